"""TriAxialKV's comparison on our models: the papers' layouts, ours, ablations of the axes, ageing, and a scan of budgets.

python -m kvstrata.eval.triaxial_study --out docs/results/triaxial [--model qwen05] [--rows comparison,axes,profiles,ageing,scan]
writes OUT.json after each run and OUT.md from it. Runs that OUT.json holds already are not made again, so an interrupted study goes on
where it stopped, and two on different conversations may write one file. Protocol "turns". Knows nothing of how a setting is run.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvstrata.eval import study as study_file
from kvstrata.eval.conversation import ask, render
from kvstrata.eval.evaluate import run
from kvstrata.eval.models import Device, load
from kvstrata.eval.protocols import make_task, run_reference
from kvstrata.eval.results import Setting
from kvstrata.eval.study import pooled, record
from kvstrata.eval.traces import Trace, load_traces
from kvstrata.policy.triaxial import ALL_AXES
from kvstrata.session import Session
from kvstrata.types import PAGE_SIZE, Tier

SOURCES = (("bfcl:multi_turn_base", (0, 2)), ("bfcl:multi_turn_long_context", (0, 5)), ("bfcl:memory:student", (0,)))
"""Conversations of 4,000 tokens and more, none of which a shipped profile has seen."""
MEMORY_MESSAGES, MEMORY_QUESTIONS = 30, 8
"""A memory conversation is cut to its first messages and to questions that they answer."""
BITS = 3.0
BEST, WIDE = "ours to INT4, 3.0", "ours, 3.0, window of 64"


@dataclass(frozen=True)
class Row:
    """A named setting. group: the table it belongs to; needs: label of a row whose real bits become this one's budget."""

    group: str
    label: str
    setting: Setting
    needs: str = ""


def triaxial(bits: float | None, **options: Any) -> Setting:
    return Setting("triaxial", budget_bits=bits, options=tuple(options.items()))


def without(*axes: str) -> tuple[str, ...]:
    return tuple(a for a in ALL_AXES if a not in axes)


def make_rows(own: str, published: str, others: dict[str, str]) -> list[Row]:
    """own: profile of the model, of our codec; published: measured with the paper's codec; others: profiles by name."""
    paper = Setting("triaxial", codec="triaxial", window=0, options=(
        ("profile", published), ("tiers", (2, 4)), ("unit", "tag"), ("sinks", 0), ("nominal", 2.7), ("measure", "mse"),
        ("axes", without("distance"))))  # fmt: skip
    as_published, kivi = "TriAxialKV as published, nominal 2.7", "KIVI 2-bit"
    rows = [
        Row("comparison", "ours, 3.0", triaxial(BITS, profile=own)),
        Row("comparison", BEST, triaxial(BITS, profile=own, tiers=(2, 3, 4))),
        Row("comparison", WIDE, replace(triaxial(BITS, profile=own), window=64)),
        Row("comparison", "uniform, 3.0", Setting(budget_bits=BITS)),
        Row("comparison", "uniform, 3.0, no window", Setting(budget_bits=BITS, window=0)),
        Row("comparison", "uniform, 3.2", Setting(budget_bits=3.2)),
        Row("comparison", kivi, Setting(tier=Tier.INT2, codec="kivi")),
        Row("comparison", "ours at KIVI's bits", triaxial(None, profile=own), kivi),
        Row("comparison", "FP4 uniform", Setting(tier=Tier.INT4, codec="hyquant-fp")),
        Row("comparison", as_published, paper),
        Row("comparison", "ours at the published layout's bits", triaxial(None, profile=own), as_published),
        Row("comparison", "ours, 3.5", triaxial(3.5, profile=own)),
        Row("comparison", "uniform, 3.5", Setting(budget_bits=3.5)),
        Row("comparison", "full", Setting("full", dense_dtype="float32")),
        Row("axes", "without temporal", triaxial(BITS, profile=own, axes=without("temporal"))),
        Row("axes", "without semantic", triaxial(BITS, profile=own, axes=without("semantic"))),
        Row("axes", "without distance: the paper's three", triaxial(BITS, profile=own, axes=without("distance"))),
        Row("axes", "without temporal and distance", triaxial(BITS, profile=own, axes=without("temporal", "distance"))),
        Row("axes", "without modal", triaxial(BITS, profile=own, axes=without("modal"))),
        Row("ageing", "frozen at first write", triaxial(BITS, profile=own, frozen=True)),
        Row("axes", "loss not scaled by output (mse)", triaxial(BITS, profile=own, measure="mse")),
    ]
    rows += [Row("profiles", f"profile {name}", triaxial(BITS, profile=path, tiers=(2, 3, 4))) for name, path in others.items()]
    rows += [Row("scan", f"{b / 10:.1f}", triaxial(b / 10, profile=own)) for b in range(24, 46)]
    return rows


def memory(trace: Trace) -> Trace:
    """The first messages, and questions whose source lies in them."""
    messages = trace.messages[:MEMORY_MESSAGES]
    text = "\n".join(str(m["content"]) for m in messages)
    questions = [q for q in trace.questions if q.source and q.source in text]
    return replace(trace, messages=messages, questions=tuple(questions[:MEMORY_QUESTIONS]))


def kind(trace: str) -> str:
    return trace.rstrip("0123456789").rstrip("_") if not trace.startswith("memory") else "memory"


def markdown(data: dict[str, Any]) -> str:
    """A table for each group and kind of conversation, and the figures we hold ourselves to."""
    tables: list[tuple[str, str, list[dict[str, Any]]]] = []
    runs = data["runs"]
    for group in dict.fromkeys(r["group"] for r in runs):
        for which in dict.fromkeys(kind(r["trace"]) for r in runs if r["group"] == group):
            # a table's first line is what the others are compared with
            first = BEST if group == "profiles" else "ours, 3.0"
            most = {r["trace"] for r in runs if r["group"] == group and r["label"] != first and kind(r["trace"]) == which}
            mine = [r for r in runs if r["trace"] in most and (r["group"] == group or r["label"] == first)]
            labels = sorted(dict.fromkeys(r["label"] for r in mine), key=lambda x: (x != first, _order(x, mine)))
            rows = [pooled([r for r in mine if r["label"] == x]) for x in labels]
            for row in rows:
                # means over other conversations are no neighbours of the rest
                if row["runs"] < len(most):
                    row["label"] += f" ({row['runs']} of {len(most)} conversations)"
            tables.append((group, f"{which}, {len(most)} conversation{'s' * (len(most) > 1)}", rows))
    return study_file.render("triaxial.md.j2", model=data["model"], tables=tables, verdicts=verdicts(runs), turns=data["turns"])


def _order(label: str, runs: Sequence[dict[str, Any]]) -> int:
    return next(i for i, r in enumerate(runs) if r["label"] == label)


def verdicts(runs: Sequence[dict[str, Any]]) -> list[str]:
    """The figures: met or missed, on conversations of 4,000 tokens and more."""
    long = [r for r in runs if r["tokens"] >= 4000 and not r["trace"].startswith("memory")]
    lines = []
    for mine in ("ours, 3.0", BEST):
        pairs_of = [(r, other) for r in long if r["label"] == mine and (other := nearest(r, long))]
        if pairs_of:
            ours, other = (pooled([pair[i] for pair in pairs_of]) for i in (0, 1))
            word = "met" if ours["kl"] <= 0.5 * other["kl"] else "MISSED"
            lines.append(
                f"{mine}: KL at most half of uniform's at the same bytes: {ours['kl']:.4f} at {ours['bits']:.2f} bits, "
                f"uniform {other['kl']:.4f} at {other['bits']:.2f} bits, ratio {ours['kl'] / other['kl']:.2f}: {word}"
            )
    pairs = [("ours at KIVI's bits", "KIVI 2-bit"), ("ours at the published layout's bits", "TriAxialKV as published, nominal 2.7")]
    for mine, theirs in pairs:
        both = {r["trace"] for r in long if r["label"] == mine} & {r["trace"] for r in long if r["label"] == theirs}
        if both:
            a, b = (pooled([r for r in long if r["label"] == x and r["trace"] in both]) for x in (mine, theirs))
            word = "met" if a["kl"] <= 0.5 * b["kl"] else "MISSED"
            lines.append(f"KL at most half of {theirs}'s at its bytes ({b['bits']:.2f} bits): {a['kl']:.4f} against {b['kl']:.4f}: {word}")
    high = [r for r in long if r["label"] == "ours, 3.5"]
    if high:
        r = pooled(high)
        word = "met" if r["call_top1"] >= 0.99 else "MISSED"
        lines.append(f"tool-call top-1 within 1 point of full at 3.5 bits: {r['call_top1']:.4f} at {r['bits']:.2f} bits: {word}")
    return lines


def nearest(run: dict[str, Any], runs: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The run of `uniform`, with the window that it needs, on the same conversation with the fewest bits that are no fewer (but for a
    hundredth)."""
    windowed = [r for r in runs if r["label"].startswith("uniform") and not r["label"].endswith("no window")]
    uniform = [r for r in windowed if r["trace"] == run["trace"] and r["bits"] >= run["bits"] - 0.01]
    return min(uniform, key=lambda r: r["bits"], default=None)


def bytes_by_turn(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, trace: Trace, setting: Setting) -> list[list[int]]:
    """After each turn: KiB that the pages of each turn hold, turn 0 (before the first user message) first. A page is its first token's."""
    task = make_task("turns", render(tokenizer, trace))
    table: list[list[int]] = []
    with Session(model, tokenizer, capacity_tokens=len(task.conversation) + 64, **setting.session_arguments()) as session:
        for end in task.chunks:
            spans = task.conversation.spans_until(end)
            session.feed(task.conversation.token_ids[:end], spans, logits_to_keep=1)
            held: Counter[int] = Counter()
            turn_of = [next(s.turn for s in spans if s.start <= p * PAGE_SIZE < s.end) for p in range(-(-end // PAGE_SIZE))]
            for turn, tier in zip(turn_of, session.page_tiers(), strict=True):
                held[turn] += session.layout.page_bytes(tier)
            if spans[-1].turn >= len(table):
                table.append([])
            table[-1] = [held[t] // 1024 for t in range(spans[-1].turn + 1)]
    return table


def main(
    out: Annotated[Path, typer.Option(help="Results without an ending: OUT.json and OUT.md are written.")],
    model: str = "qwen05",
    rows: Annotated[
        str, typer.Option(help="Groups of rows: comparison, axes, ageing, profiles, scan.")
    ] = "comparison,axes,ageing,profiles,scan",
    sources: Annotated[str, typer.Option(help="Sources to run, all by default: any part of their names.")] = "",
    own: Annotated[str, typer.Option(help="The model's own profile.")] = "qwen05",
    published: Annotated[str, typer.Option(help="A profile measured with codec triaxial.")] = "qwen05-triaxial",
    other: Annotated[list[str] | None, typer.Option(help="NAME=PROFILE, to compare with the model's own.")] = None,
    only: Annotated[str, typer.Option(help="Labels of rows to run, separated by semicolons; all by default.")] = "",
    device: Device = "cpu",
) -> None:
    name = Path(model).name
    data = study_file.begun(out, model=name, runs=[], turns=[])
    others = {"default": "default", "smollm2": "smollm2"} | dict(o.split("=", 1) for o in other or [])
    wanted = [r for r in make_rows(own, published, others) if r.group in rows.split(",") and (not only or r.label in only.split(";"))]
    loaded, tokenizer = load(model, device=device)
    for source, places in SOURCES:
        if sources and sources not in source:
            continue
        traces = load_traces(source, max(places) + 1).traces
        for place in places:
            trace = traces[place]
            # axes are left out one by one on the first conversation of each source, budgets are scanned on the very first
            some = [r for r in wanted if r.group != "axes" or place == places[0]]
            some = [r for r in some if r.group != "scan" or (source, place) == (SOURCES[0][0], places[0])]
            study(loaded, tokenizer, memory(trace) if trace.questions else trace, some, data, out)
    if "ageing" in rows and not data["turns"]:
        (told,) = load_traces("recall:16").traces
        # by nominal bits: such a conversation is too short for a budget in real bits to press on it
        setting = triaxial(None, profile=own, tiers=(2, 3, 4), nominal=3.0)
        data["turns"] = bytes_by_turn(loaded, tokenizer, replace(told, questions=()), setting)
        save(data, out)


def study(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, trace: Trace, rows: Sequence[Row], data: dict[str, Any], out: Path
) -> None:
    """Run what is missing of `rows` on one conversation."""
    done = {r["label"]: r for r in data["runs"] if r["trace"] == trace.id}
    missing = [r for r in rows if r.label not in done]
    if not missing:
        return
    task = make_task("turns", *ask(tokenizer, trace, trace.questions)) if trace.questions else make_task("turns", render(tokenizer, trace))
    reference = run_reference(model, task)
    for row in missing:
        if row.needs and row.needs not in done:
            continue
        setting = replace(row.setting, budget_bits=done[row.needs]["bits"]) if row.needs else row.setting
        try:
            done[row.label] = record(row.group, row.label, task, run(model, tokenizer, setting, task, reference))
        except ValueError as error:
            print(f"{trace.id} {row.label}: {error}", flush=True)
            continue
        data["runs"].append(done[row.label])
        save(data, out)
        print(f"{trace.id} {row.label}: {done[row.label]['bits']:.2f} bits, KL {done[row.label]['kl']:.4f}", flush=True)


def save(data: dict[str, Any], out: Path) -> None:
    study_file.save(data, out, lambda r: (r["trace"], r["label"]), markdown)


if __name__ == "__main__":
    typer.run(main)
