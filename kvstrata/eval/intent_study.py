"""Eviction by intent on deep-research conversations: what is still known, what is lost, reused, held and read, at budgets of tokens.

python -m kvstrata.eval.intent_study --out docs/results/intent [--model qwen05] [--tokens 16000] [--protocol oneshot] [--rows budget,...]
writes OUT.json after each run and OUT.md from it. What OUT.json holds already is not run again, so an interrupted study goes on where
it stopped, and several may write one file. `turns` feeds prompts and replies one after another, as an agent runs; `oneshot` computes the
whole reading once for all rows, lets each evict once, and asks. Knows nothing of how a setting is run.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvstrata.eval import study as study_file
from kvstrata.eval.conversation import Conversation, ask
from kvstrata.eval.evaluate import SLACK, check_length
from kvstrata.eval.models import Device, load
from kvstrata.eval.needles import judge
from kvstrata.eval.protocols import Reference, Task, check_protocol, make_task, run_reference, run_session
from kvstrata.eval.replay import replayed
from kvstrata.eval.research import SCENARIOS, TOKENS, without_evidence
from kvstrata.eval.results import Setting
from kvstrata.eval.study import pooled, record
from kvstrata.eval.traces import Trace, at_end, load_traces
from kvstrata.policy import POLICIES
from kvstrata.session import Session
from kvstrata.turn import TurnReport
from kvstrata.types import Tier

GROUPS = ("budget", "ablation", "tier", "stored", "prefix", "bits", "control")
BUDGETS = (0.5, 0.25, 0.125)
"""Shares of the tokens that are kept."""
BASELINES = ("streaming", "snapkv", "h2o", "recent", "random")
OURS, MAIN = "intentkv", 0.25
FULL, CONTROL = "full", "full, evidence removed"
GENERATED = 12


@dataclass(frozen=True)
class Row:
    """A named setting. group: the table it belongs to; evidence: False runs it where no passage holds an answer."""

    group: str
    label: str
    setting: Setting
    evidence: bool = True


def kept(policy: str, share: float, tier: Tier | None = None, **options: Any) -> Setting:
    """A policy that evicts down to a share of the tokens."""
    return Setting(policy, tier, options=(("kept", share), *options.items()))


def name_of(policy: str, share: float) -> str:
    return f"{policy} {100 * share:g}%"


def make_rows(residual: str | None = None) -> list[Row]:
    """Of each group in order of what is wanted first. residual: file of a residual head, where there is one."""
    exact = Setting("full", dense_dtype="float32")
    rows = [Row("budget", FULL, exact)]
    # the main budget first
    for share in sorted(BUDGETS, key=lambda b: b != MAIN):
        rows += [Row("budget", name_of(p, share), kept(p, share)) for p in (OURS, *BASELINES)]
    main = name_of(OURS, MAIN)
    rows += [
        Row("ablation", f"{main}, no memory", kept(OURS, MAIN, memory=False)),
        Row("ablation", f"{main}, one choice for all heads", kept(OURS, MAIN, per_head=False)),
        Row("ablation", f"{main}, masked and not gathered", kept(OURS, MAIN, per_head=False, repack=False)),
        Row("ablation", f"{main}, remembered queries where they were asked", kept(OURS, MAIN, rope="asked")),
        Row("ablation", f"{main}, attention summed", kept(OURS, MAIN, pool="sum")),
    ]
    if residual is not None:
        rows += [Row("ablation", f"{name_of(OURS, b)}, residual", kept(OURS, b, residual=residual)) for b in BUDGETS]
        rows += [
            *(
                Row("ablation", f"{name_of(OURS, b)}, residual, newest turn too", kept(OURS, b, residual=residual, turns=0))
                for b in BUDGETS
            ),
            Row("ablation", f"{main}, residual, no memory", kept(OURS, MAIN, residual=residual, memory=False)),
            # few planes of many tokens, or more of fewer
            *(
                Row(
                    "bits",
                    f"{OURS} {t.name} at {bits} bits, residual, newest turn too",
                    Setting(OURS, budget_bits=bits, options=(("tier", t.name), ("residual", residual), ("turns", 0))),
                )
                for bits in (1.0, 2.0)
                for t in (Tier.INT2, Tier.INT3, Tier.INT4)
            ),
            # about the bytes of a quarter of the tokens at BF16
            Row("tier", f"{name_of(OURS, 0.88)}, INT4, residual", kept(OURS, 0.88, Tier.INT4, residual=residual)),
            Row("tier", f"{name_of(OURS, 0.44)}, INT4, residual", kept(OURS, 0.44, Tier.INT4, residual=residual)),
        ]
    for tier in (Tier.INT8, Tier.INT4, Tier.INT3):
        rows.append(Row("tier", f"{main}, {tier.name}", kept(OURS, MAIN, tier)))
    # as many tokens as have about the bytes of a quarter of them at BF16, and of an eighth
    for tier, share in ((Tier.INT4, 0.88), (Tier.INT4, 0.44), (Tier.INT3, 0.58)):
        rows.append(Row("tier", f"{name_of(OURS, share)}, {tier.name}", kept(OURS, share, tier)))
    rows += [
        Row("stored", "uniform INT4", Setting(tier=Tier.INT4)),
        Row("stored", "uniform INT2", Setting(tier=Tier.INT2)),
        Row("stored", "hyquant INT2 + 5%", Setting("hyquant", Tier.INT2, options=(("rho", 0.05),))),
        *(Row("prefix", f"{name_of(p, MAIN)}, renumbered", kept(p, MAIN, renumber=True)) for p in (OURS, "snapkv")),
        Row("control", CONTROL, exact, evidence=False),
    ]
    return rows


def research_task(tokenizer: PreTrainedTokenizerBase, trace: Trace, protocol: str) -> Task:
    """What `protocol` runs. In turns an answer is a step of its own, as every reply is: what goes when a question has been read goes
    before its answer."""
    questions = at_end(trace.questions) if protocol == "oneshot" else trace.questions
    task = make_task(protocol, *ask(tokenizer, trace, questions))
    return replace(task, chunks=tuple(task.conversation.chunks())) if protocol == "turns" else task


def kv_read(conversation: Conversation, chunks: Sequence[int], reports: Sequence[TurnReport]) -> int:
    """Bytes that attention read of the cache: what is stored after a step, once for its prompt and once for each token of a reply in it.

    The first step is one prefill, whatever it holds.
    """
    total, start = 0, 0
    for end, report in zip(chunks, reports, strict=True):
        replied = sum(max(0, min(end, b) - max(start, a)) for a, b in conversation.replies) if start else 0
        total += report.bytes_stored * (replied + (replied < end - start))
        start = end
    return total


def says(text: str, answer: str) -> bool:
    """Whether a reply begins with the answer, be it in other capitals or quotes."""
    return text.strip(" \n'\"‘’“”*.").casefold().startswith(answer.casefold())


@torch.inference_mode()
def generated(session: Session, tokenizer: PreTrainedTokenizerBase, task: Task, count: int) -> list[str]:
    """What a session answers itself, greedily, to each question at the conversation's end, which it has just held: `count` tokens after the
    words that are given. Last question first, so that each is a crop of what is held."""
    ids, out = task.conversation.token_ids, []
    for a in reversed([a for a in task.asked if a.question.at < 0]):
        held = ids[: a.start]
        for _ in range(count):
            held = [*held, int(session.feed(held, logits_to_keep=1)[-1].argmax())]
            if held[-1] == tokenizer.eos_token_id:
                break
        out.append(str(tokenizer.decode(held[a.start :], skip_special_tokens=True)))
    return out[::-1]


def run_row(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, row: Row, protocol: str, task: Task, reference: Reference, count: int = 0
) -> dict[str, Any]:
    """One row on one conversation, as JSON. count: tokens that each answer is generated for besides; 0: none."""
    capacity, started = len(task.conversation) + SLACK + count, time.process_time()
    session = Session(model, tokenizer, capacity_tokens=capacity, chunk_tokens=task.chunk_tokens(), **row.setting.session_arguments())
    with session, replayed(model, reference.prefill):
        outcome = run_session(session, task, reference)
        measured = record(row.group, row.label, task, outcome) | {
            "protocol": protocol, "reused": outcome.reused_tokens, "fed": outcome.fed_tokens,
            "peak_tokens": max(r.peak_tokens for r in session.reports),
            "peak_bytes": max(r.peak_bytes for r in session.reports), "kv_read": kv_read(task.conversation, task.chunks, session.reports),
            "cpu_seconds": round(time.process_time() - started, 1), "answers": [a.question.answer for a in task.asked],
            "hits": [f.hit for f in judge(task.asked, outcome.scores, task.context)],
        }  # fmt: skip
        told = generated(session, tokenizer, task, count) if count else []
    asked = [a.question.answer for a in task.asked if a.question.at < 0]
    return measured | {"generated": told, "generated_hits": sum(map(says, told, asked))}


def summed(runs: Sequence[dict[str, Any]], full: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Runs of one row on several conversations, and the answers that the full cache gives on the same."""
    told = [r for r in runs if r["generated"]]
    return pooled(runs) | {
        "hits": sum(r["facts_hit"] for r in runs), "full_hits": sum(full[r["trace"]]["facts_hit"] for r in runs if r["trace"] in full),
        "asked": sum(len(r["fact_logp"]) for r in runs), "reuse": sum(r["reused"] for r in runs) / sum(r["fed"] for r in runs),
        "said": f"{sum(r['generated_hits'] for r in told)}/{sum(len(r['generated']) for r in told)}" if told else "-",
        "peak_tokens": max(r["peak_tokens"] for r in runs), "peak_bytes": max(r["peak_bytes"] for r in runs),
        "kv_read": sum(r["kv_read"] for r in runs) / len(runs), "seconds": sum(r["seconds"] for r in runs) / len(runs),
    }  # fmt: skip


def size(trace: str) -> str:
    """The nominal length in a conversation's name, by which tables are told apart."""
    return trace.removesuffix("_without_evidence").rpartition("_")[2]


def tables_of(runs: Sequence[dict[str, Any]]) -> list[tuple[str, str, list[dict[str, Any]]]]:
    """(protocol and length, group, rows); a table's first row is the full cache."""
    tables = []
    for protocol, length in dict.fromkeys((r["protocol"], size(r["trace"])) for r in runs):
        of = [r for r in runs if (r["protocol"], size(r["trace"])) == (protocol, length)]
        full = {r["trace"]: r for r in of if r["label"] == FULL}
        for group in [g for g in GROUPS if any(r["group"] == g for r in of)]:
            labels = dict.fromkeys([r["label"] for r in of if r["label"] == FULL] + [r["label"] for r in of if r["group"] == group])
            rows = [summed([r for r in of if r["label"] == label], full) for label in labels]
            tables.append((f"{protocol}, {length} tokens", group, rows))
    return tables


def verdicts(runs: Sequence[dict[str, Any]]) -> list[str]:
    """The figures: met or missed, at each protocol and length, on the conversations that all of the compared rows ran on."""
    lines = []
    for protocol, length in dict.fromkeys((r["protocol"], size(r["trace"])) for r in runs):
        of = {(r["label"], r["trace"]): r for r in runs if (r["protocol"], size(r["trace"])) == (protocol, length)}

        def hits(*labels: str, of: dict[Any, Any] = of) -> tuple[int, list[list[dict[str, Any]]]]:
            """Conversations that all rows have, and each row's runs on them."""
            common = [t for t in dict.fromkeys(t for _, t in of) if all((label, t) in of for label in labels)]
            return len(common), [[of[label, t] for t in common] for label in labels]

        rule, where = name_of(OURS, MAIN), f"{protocol}, {length} tokens"
        # with its head where one was run
        main = next((label for label in (f"{rule}, residual", rule) if any(label == found for found, _ in of)), rule)
        count, (ours, full) = hits(main, FULL)
        if count:
            a, b = (sum(r["facts_hit"] for r in x) for x in (ours, full))
            lines.append(f"{where}: {main} gives {a} of full's {b} answers, 90% wanted: {_word(a >= 0.9 * b)}")
            a, b = (100 * sum(r["reused"] for r in x) / sum(r["fed"] for r in x) for x in (ours, full))
            lines.append(f"{where}: prefix hit rate {a:.1f}%, full {b:.1f}%, within 2 points wanted: {_word(abs(a - b) <= 2)}")
        for other in ("streaming", "snapkv"):
            count, (ours, theirs) = hits(main, name_of(other, MAIN))
            if count:
                asked = sum(len(r["fact_logp"]) for r in ours)
                points = 100 * (sum(r["facts_hit"] for r in ours) - sum(r["facts_hit"] for r in theirs)) / asked
                lines.append(f"{where}: {points:+.1f} points over {other}, 10 wanted: {_word(points >= 10)}")
        for rule in map(partial(name_of, OURS), BUDGETS):
            count, (with_head, without) = hits(f"{rule}, residual", rule)
            if count:
                a, b = (sum(sum(r["fact_logp"]) for r in x) / sum(len(r["fact_logp"]) for r in x) for x in (with_head, without))
                lines.append(f"{where}: {rule}, mean log p {a:.2f} with the residual, {b:.2f} by rule alone: {_word(a >= b)}")
    return lines


def _word(met: bool) -> str:
    return "met" if met else "MISSED"


def markdown(data: dict[str, Any]) -> str:
    return study_file.render("intent.md.j2", model=data["model"], tables=tables_of(data["runs"]), verdicts=verdicts(data["runs"]))


def save(data: dict[str, Any], out: Path) -> None:
    study_file.save(data, out, lambda r: (r["protocol"], r["trace"], r["label"]), markdown)


def study(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, trace: Trace, rows: Sequence[Row], protocol: str, data: dict[str, Any],
    out: Path, count: int = 0,
) -> None:  # fmt: skip
    """Run what is missing of `rows` on one conversation, and on the same without its evidence."""
    for source, evidence in ((trace, True), (without_evidence(trace), False)):
        done = {r["label"] for r in data["runs"] if (r["protocol"], r["trace"]) == (protocol, source.id)}
        missing = []
        for row in rows:
            if row.evidence is evidence and row.label not in done:
                if row.setting.policy in POLICIES:
                    missing.append(row)
                else:
                    print(f"{row.label}: no policy {row.setting.policy!r} here; left out", flush=True)
        if not missing:
            continue
        task = research_task(tokenizer, source, protocol)
        check_length(model, task)
        # what is evicted may be chosen by any query of the reading
        started = time.process_time()
        reference = run_reference(model, task, queries=len(task.conversation))
        cpu = {"reference_cpu_seconds": round(time.process_time() - started, 1)}
        for row in missing:
            try:
                measured = run_row(model, tokenizer, row, protocol, task, reference, count) | cpu
            except (ValueError, RuntimeError) as error:  # RuntimeError: out of frames, out of memory
                print(f"{source.id} {row.label}: {error}", flush=True)
                continue
            data["runs"].append(measured)
            save(data, out)
            mean = sum(measured["fact_logp"]) / len(measured["fact_logp"])
            print(f"{source.id} {row.label}: {measured['facts_hit']} of {len(task.asked)}, log p {mean:.2f}, "
                  f"KL {measured['kl']:.4f}, {measured['seconds']} s", flush=True)  # fmt: skip


def main(
    out: Annotated[Path, typer.Option(help="Results without an ending: OUT.json and OUT.md are written.")],
    model: str = "qwen05",
    rows: Annotated[str, typer.Option(help=f"Groups of rows: {', '.join(GROUPS)}.")] = ",".join(GROUPS),
    only: Annotated[str, typer.Option(help="Labels of rows to run, separated by semicolons; all by default.")] = "",
    scenarios: Annotated[str, typer.Option(help="Whom the reports are on.")] = ",".join(SCENARIOS),
    tokens: Annotated[int, typer.Option(help="Length of a conversation.")] = TOKENS,
    protocol: Annotated[str, typer.Option(help="oneshot or turns.")] = "oneshot",
    residual: Annotated[str, typer.Option(help="File of a residual head.")] = "",
    generate: Annotated[int, typer.Option(help="Tokens of answers that sessions give themselves; 0: none.")] = 0,
    device: Device = "cpu",
) -> None:
    check_protocol(protocol)
    groups = rows.split(",")
    data = study_file.begun(out, model=Path(model).name, runs=[])
    wanted = [r for r in make_rows(residual or None) if r.group in groups and (not only or r.label in only.split(";"))]
    traces = [load_traces(f"research:{s}:{tokens}").traces[0] for s in scenarios.split(",")]
    loaded, tokenizer = load(model, device=device)
    for trace in traces:
        study(loaded, tokenizer, trace, wanted, protocol, data, out, generate)


if __name__ == "__main__":
    typer.run(main)
