"""The command line: demo, tag, eval, report, chat, serve, calibrate, train-intent. Commands import torch inside, for --help.

Exit codes: 0 done, 1 a part failed (each named on stderr; the rest ran), 2 the command was called wrongly.
"""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstrata import cli_compare
from kvstrata.eval.models import Device
from kvstrata.options import Budget, Codec, DenseType, Model, Policy, Quality, Settings, TierName, Traces, Window, make_setting, named_value
from kvstrata.terminal import check_output, complain, err, fail, load_model, load_tokenizer, out, print_table, progress_bar, usage_errors

app = typer.Typer(
    help="KV cache of language-model agents as strata: pages of 2-bit planes, kept by what each token is.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command("eval")
def evaluate_command(
    model: Model,
    traces: Traces,
    policy: Policy = "uniform",
    tier: TierName = None,
    budget_bits: Budget = None,
    quality: Quality = None,
    codec: Codec = "planes",
    window: Window = None,
    settings: Settings = None,
    protocol: Annotated[str, typer.Option(help="turns: as a session runs; oneshot: one prefill, the last 400 tokens scored.")] = "turns",
    needles: Annotated[int, typer.Option(help="Facts planted in each conversation that asks nothing itself; 0 for none.")] = 5,
    dense_dtype: DenseType = None,
    limit: Annotated[int | None, typer.Option(help="Conversations at most.")] = None,
    device: Device = "cpu",
    json_out: Annotated[str | None, typer.Option("--json", help="Write the figures as JSON to this file, or - for stdout.")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Ours and every peer beside it, at their real bytes (docs/peers.md).")] = False,
    groups: Annotated[str, typer.Option(help="With --compare: which of ours, papers, quantizers, formats, eviction; all.")] = "all",
) -> None:
    """Judge a setting on conversations, token by token against the uncompressed cache."""
    with usage_errors():
        from kvstrata.eval.needles import facts
        from kvstrata.eval.protocols import check_protocol
        from kvstrata.eval.traces import load_traces

        setting = make_setting(policy, tier, budget_bits, codec, window, dense_dtype, settings, quality)
        check_protocol(protocol)
        facts(needles)
        if compare:
            from kvstrata.eval.peers.rows import chosen_rows

            chosen_rows("", groups)
        if json_out not in (None, "-"):
            check_output("--json", Path(json_out))
        found = load_traces(traces, limit)
    for line in found.errors:
        complain(line)
    if not found.traces:
        raise fail(f"no conversation of {traces} could be read", 1)
    loaded, tokenizer = load_model(model, device)
    if compare:
        if (
            cli_compare.compare(loaded, tokenizer, Path(model).name, found, setting, groups, protocol, needles, json_out)
            and not found.errors
        ):
            return
        raise typer.Exit(1)
    from kvstrata.eval.evaluate import evaluate
    from kvstrata.eval.table import results_table

    with usage_errors(), progress_bar() as progress:
        name = Path(model).name
        done = evaluate(loaded, tokenizer, found.traces, [setting], name=name, protocol=protocol, needles=needles, progress=progress)
    for line in done.errors:
        complain(line)
    if not done.results[0].outcomes:
        raise fail("no conversation could be run", 1)
    if json_out == "-":
        print(done.results[0].to_json())
    else:
        print_table(results_table(done.results))
        if json_out is not None:
            with usage_errors():
                Path(json_out).write_text(done.results[0].to_json() + "\n", encoding="utf-8")
    if found.errors or done.errors:
        raise typer.Exit(1)


@app.command()
def demo(
    model: Model = "smollm2",
    traces: Annotated[Path | None, typer.Option(help="JSONL whose first conversation is run; the one in examples/ by default.")] = None,
    report: Annotated[Path, typer.Option(help="Where the report goes.")] = Path("report.html"),
    device: Device = "cpu",
) -> None:
    """A real agent conversation at six settings: a table, and report.html."""
    with usage_errors():
        from kvstrata.eval.demo import SETTINGS, example, run_demo

        check_output("--report", report)
        source = traces or example()
        from kvstrata.eval.traces import load_traces

        found = load_traces(str(source), 1)
        if found.errors or not found.traces:
            raise ValueError(found.errors[0])
    loaded, tokenizer = load_model(model, device)
    from kvstrata.eval.table import results_table

    with usage_errors(), progress_bar() as progress:
        results = run_demo(loaded, tokenizer, found.traces[0], SETTINGS, report, name=Path(model).name, progress=progress)
    print_table(results_table(results))
    out.print(f"report: {report.resolve()}", soft_wrap=True)


app.command()(cli_compare.report)


@app.command()
def tag(
    model: Model,
    traces: Traces,
    limit: Annotated[int | None, typer.Option(help="Conversations at most.")] = 1,
    json_out: Annotated[bool, typer.Option("--json", help="Print spans as JSON lines.")] = False,
) -> None:
    """Show what each token of a conversation is: role, modality and age. Needs the tokenizer alone."""
    with usage_errors():
        from kvstrata.eval.traces import load_traces

        found = load_traces(traces, limit)
    tokenizer = load_tokenizer(model)
    failed = list(found.errors)
    from kvstrata.eval.conversation import render
    from kvstrata.eval.table import spans_table

    for trace in found.traces:
        try:
            conversation = render(tokenizer, trace)
        except ValueError as error:
            failed.append(str(error))
            continue
        if json_out:
            for s in conversation.spans:
                record = {"trace": trace.id, "start": s.start, "end": s.end, "role": s.role, "modality": s.modality, "turn": s.turn}
                print(json.dumps(record | {"text": conversation.span_text(s)}, ensure_ascii=False))
        else:
            print_table(spans_table(conversation))
    for line in failed:
        complain(line)
    if failed:
        raise typer.Exit(1)


def _model_and_conversations(
    model: str, device: str, traces: list[str], out_path: Path, limit: int | None, skip: int, *, asked: bool = False
) -> tuple[Any, Any, list[str]]:
    """Once OUT can be written: the model, the conversations (asked: with their questions), and a line, said already, for each failure."""
    from kvstrata.calibrate.run import samples

    with usage_errors():
        from kvstrata.eval.conversation import ask, render
        from kvstrata.eval.traces import load_traces

        out_path.parent.mkdir(parents=True, exist_ok=True)
        check_output("--out", out_path)
        found = [load_traces(source, None if limit is None else skip + limit) for source in traces]
    loaded, tokenizer = load_model(model, device)

    def conversation(trace: Any) -> Any:
        return ask(tokenizer, trace, trace.questions)[0] if asked and trace.questions else render(tokenizer, trace)

    read, failed = samples(conversation, [t for f in found for t in f.traces[skip:]])
    failed = [line for f in found for line in f.errors] + failed
    for line in failed:
        complain(line)
    return loaded, read, failed


@app.command()
def calibrate(
    model: Model,
    traces: Annotated[list[str], typer.Option(help="As of eval; may be given more than once.")],
    out_path: Annotated[Path, typer.Option("--out", help="The profile. What is measured lies beside it, and is not measured again.")],
    limit: Annotated[int | None, typer.Option(help="Conversations of each source at most.", min=1)] = 8,
    skip: Annotated[int, typer.Option(help="Conversations of each source to leave out first, such as those to be judged on.", min=0)] = 0,
    codec: Codec = "planes",
    seed: Annotated[int, typer.Option(help="Chooses the queries.", min=0)] = 0,
    window: Annotated[int, typer.Option(help="Tokens of the recent window that will be kept at BF16.", min=0)] = 0,
    device: Device = "cpu",
) -> None:
    """Measure what coarsening each tag costs attention, for policy triaxial."""
    from kvstrata.calibrate.run import calibrate as measure

    loaded, read, failed = _model_and_conversations(model, device, traces, out_path, limit, skip)
    with usage_errors(), progress_bar() as progress:
        profile = measure(loaded, Path(model).name, read, out_path, codec=codec, seed=seed, window=window, progress=progress)
    made = profile.made
    out.print(f"{len(made['conversations'])} conversations, {made['seconds']} s: {out_path}", soft_wrap=True)
    if failed:
        raise typer.Exit(1)


@app.command("train-intent")
def train_intent(
    model: Model,
    traces: Annotated[list[str], typer.Option(help="As of eval; may be given more than once. Three conversations at least.")],
    out_path: Annotated[Path, typer.Option("--out", help="The head, HEAD.safetensors; a report of its training lies beside it.")],
    limit: Annotated[int | None, typer.Option(help="Conversations of each source at most.", min=1)] = 16,
    skip: Annotated[int, typer.Option(help="Conversations of each source to leave out first, such as those to be judged on.", min=0)] = 0,
    judge: Annotated[
        list[str] | None, typer.Option(help="Traces that judge and teach nothing; default: every fourth conversation.")
    ] = None,
    rank: Annotated[int, typer.Option(help="Of the look at the current query's K-vectors; 0: none.", min=0)] = 0,
    epochs: Annotated[int, typer.Option(min=1)] = 12,
    width: Annotated[int, typer.Option(help="Of what looks at a token when it is stored.", min=1)] = 32,
    received: Annotated[
        bool, typer.Option(help="Look at the attention that tokens received so far; sessions then have to count it.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Draws tokens, weights and order.")] = 0,
    device: Device = "cpu",
) -> None:
    """Learn what policy intentkv's rule misses: the attention that later turns really pay. The model stays as it is."""
    from kvstrata.eval.traces import load_traces
    from kvstrata.intent.run import check_turns, train_on

    with usage_errors():
        judging = {t.id for source in judge or () for t in load_traces(source, None if limit is None else skip + limit).traces[skip:]}
    loaded, conversations, failed = _model_and_conversations(model, device, [*traces, *(judge or ())], out_path, limit, skip, asked=True)
    enough = []
    for c in conversations:
        try:
            check_turns(c)
            enough.append(c)
        except ValueError as error:
            complain(error)
            failed.append(str(error))
    judges = sum(c.id in judging for c in enough)
    if judge and not judges:
        raise fail(f"none of the conversations of {', '.join(judge)} can judge", 1)
    with usage_errors(), progress_bar() as progress:
        report = train_on(
            loaded,
            Path(model).name,
            enough,
            out_path,
            judges=judges,
            rank=rank,
            width=width,
            received=received,
            epochs=epochs,
            seed=seed,
            progress=progress,
        )
    kept = report["mass_kept"]
    for name in kept:
        out.print(f"{name}: " + ", ".join(f"{value:.3f} at {share}" for share, value in kept[name].items()), soft_wrap=True)
    out.print(f"later attention kept on {', '.join(report['judged_by'])}, by share of tokens; {out_path}", soft_wrap=True)
    if failed:
        raise typer.Exit(1)


@app.command()
def chat(
    model: Model = "smollm2",
    policy: Policy = "uniform",
    tier: TierName = None,
    budget_bits: Budget = None,
    quality: Quality = None,
    codec: Codec = "planes",
    window: Window = None,
    settings: Settings = None,
    system: Annotated[str, typer.Option(help="System message.")] = "You are a helpful assistant.",
    max_new_tokens: Annotated[int, typer.Option(help="Longest reply.", min=1)] = 256,
    device: Device = "cpu",
) -> None:
    """Talk to a model whose cache is stored in strata; an empty line or end of file ends it."""
    with usage_errors():
        setting = make_setting(policy, tier, budget_bits, codec, window, None, settings, quality)
    loaded, tokenizer = load_model(model, device)
    from kvstrata.session import Session

    messages: list[dict[str, Any]] = [{"role": "system", "content": system}]
    with usage_errors(), Session(loaded, tokenizer, **setting.session_arguments()) as session:
        while text := _read_line():
            messages.append({"role": "user", "content": text})
            reply = session.chat(messages, max_new_tokens=max_new_tokens)
            messages.append(reply.message)
            out.print(reply.text, soft_wrap=True)
            r = reply.report
            bits = session.layout.bits_per_element(session.frames_in_use, r.tokens)
            saved = f"{r.bytes_stored / 2**20:.2f} MiB of {r.bytes_bf16 / 2**20:.2f} at BF16"
            floor = ", budget below the policy's floor" if r.floor_bytes else ""
            err.print(f"{r.tokens} tokens, {bits:.2f} bits{floor}, {saved}, {r.reused_tokens} reused, {r.seconds:.1f} s", style="dim")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Folder or hub id.")],
    budget_bits: Budget = None,
    policy: Annotated[str | None, typer.Option(help="uniform or triaxial (the default under a budget).")] = None,
    tier: Annotated[str | None, typer.Option(help="Tier of policy uniform, instead of --budget-bits: INT2, INT3, INT4, INT8.")] = None,
    settings: Settings = None,
) -> None:
    """Start `vllm serve` with the KV cache in strata; any of its flags may follow."""
    with usage_errors():
        from kvstrata.adapters.vllm import check_version, engine_version
        from kvstrata.adapters.vllm.serve import command

        check_version(engine_version())
        given = {"budget_bits": budget_bits, "policy": policy or ("uniform" if tier else None), "tier": tier}
        line = command(model, {k: v for k, v in given.items() if v is not None} | dict(map(named_value, settings or ())), context.args)
    # the server takes the place of this process: signals and exit codes are its own
    os.execv(line[0], line)


def _read_line() -> str:
    try:
        return (input("> ") if sys.stdin.isatty() else input()).strip()
    except EOFError:
        return ""
