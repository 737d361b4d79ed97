"""Commands of the comparison: `kvstrata report`, and what `kvstrata eval --compare` does. torch and the rest are imported inside."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstrata.eval.models import Device
from kvstrata.options import Budget, Codec, Policy, Settings, TierName, Window, make_setting
from kvstrata.terminal import check_output, complain, fail, load_model, out, print_table, progress_bar, usage_errors


def compare(
    model: Any, tokenizer: Any, name: str, traces: Any, setting: Any, groups: str, protocol: str, needles: int, json_out: str | None
) -> bool:
    """Ours, peers, and the setting that the command names, on conversations: a table, and JSON. -> whether all of it ran."""
    from kvstrata.eval.peers.compare import compared, pools, verdicts
    from kvstrata.eval.peers.need import MissingPeerError
    from kvstrata.eval.peers.rows import Row, chosen_rows
    from kvstrata.eval.table import compared_table

    with usage_errors():
        rows = [Row("ours", "yours", f"yours: {setting.label}", setting), *chosen_rows(name, groups)]
    rows = [r for r in rows if protocol in r.protocols]
    data: dict[str, Any] = {"model": name, "runs": [], "missing": {}}
    failed = False
    total = len(traces.traces) * len(rows)
    with progress_bar() as progress:
        for i, trace in enumerate(traces.traces):
            try:
                progress(f"{trace.id}: reference", i * len(rows), total)
                for j, (row, run) in enumerate(compared(model, tokenizer, trace, traces.source, rows, protocol, needles)):
                    progress(f"{trace.id}: {row.label}", i * len(rows) + j + 1, total)
                    if isinstance(run, MissingPeerError):
                        data["missing"][row.family] = str(run)
                    elif isinstance(run, str):
                        complain(run)
                        failed = True
                    else:
                        data["runs"].append(run)
            except ValueError as error:
                complain(error)
                failed = True
    if not data["runs"]:
        raise fail("no row could be run on any conversation", 1)
    if json_out == "-":
        print(json.dumps(data, indent=1))
        return not failed
    pooled = pools(data["runs"])
    print_table(compared_table(name, protocol, pooled))
    for line in verdicts(pooled, "bits"):
        out.print(line, soft_wrap=True)
    for family, why in data["missing"].items():
        out.print(f"not run: {family}: {why}", soft_wrap=True)
    if json_out is not None:
        with usage_errors():
            Path(json_out).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return not failed


def report(
    out_path: Annotated[Path, typer.Option("--out", help="The page, one HTML file that loads nothing.")] = Path("compare.html"),
    results: Annotated[
        list[Path] | None, typer.Option(help="What kvstrata.eval.peers_study or eval --compare --json wrote; may be repeated.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="With --traces: runs its first conversation, and shows what became of tokens.")] = None,
    traces: Annotated[str | None, typer.Option(help="As of eval.")] = None,
    policy: Policy = "strata",
    tier: TierName = None,
    budget_bits: Budget = None,
    codec: Codec = "planes",
    window: Window = None,
    settings: Settings = None,
    device: Device = "cpu",
) -> None:
    """Pareto fronts of ours and every peer, and a map of a conversation's tokens, as one page."""
    with usage_errors():
        from kvstrata.eval.compare_report import read_results, write_compare_report
        from kvstrata.eval.traces import load_traces

        # what needs a budget gets the one that most figures are for
        bits = 3.0 if policy == "strata" and budget_bits is None else budget_bits
        setting = make_setting(policy, tier, bits, codec, window, None, settings)
        check_output("--out", out_path)
        if (model is None) != (traces is None):
            raise ValueError("a conversation needs both --model and --traces")
        if not results and traces is None:
            raise ValueError("there is nothing to report; give --results, or --model and --traces")
        read = [read_results(file) for file in results or ()]
        found = load_traces(traces, 1) if traces is not None else None
        if found is not None and not found.traces:
            raise ValueError(found.errors[0])
    watched = None
    if model is not None and found is not None:
        loaded, tokenizer = load_model(model, device)
        from kvstrata.eval.watched import watch

        with usage_errors():
            watched = watch(loaded, tokenizer, found.traces[0], setting, Path(model).name)
    with usage_errors():
        write_compare_report(out_path, read, watched)
    out.print(f"report: {out_path.resolve()}", soft_wrap=True)
