"""Ours and every peer on the same conversations at the same real bytes.

python -m kvstrata.eval.peers_study --out docs/results/peers [--model qwen05] [--traces bfcl:multi_turn_base] [--places 0,20]
writes OUT.json after each run and OUT.md from it. Runs that OUT.json holds already are not made again, so an interrupted study goes on
where it stopped, and several may write one file. A peer whose package is missing is named and left out. Protocol "oneshot": one prefill,
stored once, the last 400 tokens scored; then the same with five planted facts, asked at the end. Knows nothing of how a peer stores.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvstrata.eval import study as study_file
from kvstrata.eval.models import Device, load
from kvstrata.eval.peers.compare import compared, not_run, pools, verdicts
from kvstrata.eval.peers.need import MissingPeerError
from kvstrata.eval.peers.rows import Row, chosen_rows
from kvstrata.eval.protocols import check_protocol
from kvstrata.eval.traces import Trace, load_traces


def tables_of(data: dict[str, Any]) -> list[tuple[str, list[dict[str, Any]]]]:
    """(protocol and source, rows)."""
    tables = []
    for protocol, source in dict.fromkeys((r["protocol"], r["source"]) for r in data["runs"]):
        of = [r for r in data["runs"] if (r["protocol"], r["source"]) == (protocol, source)]
        count = len({r["trace"] for r in of})
        tables.append((f"{source}, {protocol}, {count} conversation{'s' * (count > 1)}", pools(of)))
    return tables


def markdown(data: dict[str, Any]) -> str:
    tables = [(title, rows, verdicts(rows, "bits"), verdicts(rows, "held")) for title, rows in tables_of(data)]
    return study_file.render("peers.md.j2", model=data["model"], tables=tables, missing=not_run(data))


def save(data: dict[str, Any], out: Path) -> None:
    study_file.save(data, out, lambda r: (r["protocol"], r["trace"], r["label"]), markdown)


def study(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, trace: Trace, source: str, rows: Sequence[Row], protocol: str, needles: int,
    data: dict[str, Any], out: Path,
) -> None:  # fmt: skip
    """Run what is missing of `rows` on one conversation."""
    done = {r["label"] for r in data["runs"] if (r["protocol"], r["trace"]) == (protocol, trace.id)}
    wanted = [r for r in rows if protocol in r.protocols and r.label not in done]
    if not wanted:
        return
    for row, run in compared(model, tokenizer, trace, source, wanted, protocol, needles):
        if isinstance(run, str):
            print(run, flush=True)
            continue
        if isinstance(run, MissingPeerError):
            data["missing"][row.family] = str(run)
            print(f"{row.label}: {run}; left out", flush=True)
        else:
            data["runs"].append(run)
            print(f"{trace.id} {row.label}: {run['bits']:.2f} bits ({run['held']:.2f} held), KL {run['kl']:.4f}, "
                  f"facts {run['facts_hit']}/{len(run['fact_logp'])}, {run['seconds']} s", flush=True)  # fmt: skip
        save(data, out)


def main(
    out: Annotated[Path, typer.Option(help="Results without an ending: OUT.json and OUT.md are written.")],
    model: str = "qwen05",
    traces: Annotated[str, typer.Option(help="As of kvstrata eval.")] = "bfcl:multi_turn_base",
    places: Annotated[str, typer.Option(help="Which conversations of it.")] = "0,20",
    protocol: Annotated[str, typer.Option(help="oneshot or turns; under turns those peers alone whose code permits them.")] = "oneshot",
    groups: Annotated[str, typer.Option(help="Groups of rows: ours, papers, quantizers, formats, eviction; all.")] = "all",
    only: Annotated[str, typer.Option(help="Labels of rows to run, separated by semicolons; all by default.")] = "",
    profile: Annotated[str, typer.Option(help="The model's own profile; by its name where one is shipped.")] = "",
    needles: Annotated[int, typer.Option(help="Facts planted in conversations that ask nothing themselves.")] = 5,
    device: Device = "cpu",
) -> None:
    check_protocol(protocol)
    name, path = Path(model).name, out.with_suffix(".json")
    data = study_file.begun(out, model=name, runs=[], missing={})
    if data["model"] != name:
        raise typer.BadParameter(f"{path} holds runs of {data['model']}, not of {name}; give another --out")
    rows = [r for r in chosen_rows(name, groups, profile) if not only or r.label in only.split(";")]
    loaded, tokenizer = load(model, device=device)
    chosen = [int(x) for x in places.split(",")]
    found = load_traces(traces, max(chosen) + 1).traces
    for place in chosen:
        study(loaded, tokenizer, found[place], traces, rows, protocol, needles, data, out)


if __name__ == "__main__":
    typer.run(main)
