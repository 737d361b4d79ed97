"""HyQuant's comparison on our models: anchors beside a low-bit body, third planes instead, windows, shares, refreshing, what few keys take.

python -m kvstrata.eval.hyquant_study --out docs/results/hyquant [--model qwen05] [--rows anchors,pages,turns,...] [--places 0,20]
writes OUT.json after each run and OUT.md from it. What OUT.json holds already is not run again but with --again, so an interrupted study
goes on where it stopped, and several may write one file. Knows nothing of how a setting is run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvstrata.adapters.capture import captured
from kvstrata.eval import study as study_file
from kvstrata.eval.continuation import along, continue_greedily, reporting
from kvstrata.eval.conversation import Conversation, render
from kvstrata.eval.hyquant_probe import Kept, coverage, output_error, overhead, page_mass
from kvstrata.eval.models import Device, load
from kvstrata.eval.protocols import Reference, Task, make_task, run_reference, run_session
from kvstrata.eval.replay import replayed
from kvstrata.eval.results import Setting
from kvstrata.eval.study import pooled, record
from kvstrata.eval.traces import Trace, load_traces
from kvstrata.ops.codecs import make_codec
from kvstrata.policy import Budget, Plan, Signals
from kvstrata.session import Session
from kvstrata.types import Span, Tier

SOURCE, PLACES = "bfcl:multi_turn_base", "0,20"
"""Conversations of 4,800 tokens and more; those that the probes for the figures below were made on."""
GROUPS = ("anchors", "pages", "turns", "window", "alone", "coverage", "error", "formats", "generation")
SLACK = 64
LENGTHS = (1024, 2048, 4096)
GENERATED = 320


@dataclass(frozen=True)
class Row:
    """A named setting. protocol: as of eval/protocols.py. third: share of the body's pages, those of most attention mass, that get a third
    plane, K's second."""

    group: str
    label: str
    setting: Setting
    protocol: str = "oneshot"
    third: float = 0.0


def anchored(tier: Tier, rho: float, window: int = 64, **options: Any) -> Setting:
    """In the protocol "oneshot" nothing chosen after the first choice is ever attended."""
    return Setting("hyquant", tier, window=window, options=tuple(({"rho": rho, "refresh": 0} | options).items()))


def make_rows() -> list[Row]:
    """Of each group in order of what is wanted first."""
    two, three, four, int8 = Tier.INT2, Tier.INT3, Tier.INT4, {"anchor_tier": Tier.INT8}
    rows = [
        Row("anchors", "INT2", Setting(tier=two)),
        Row("anchors", "INT2 + 5%", anchored(two, 0.05)),
        Row("anchors", "INT4", Setting(tier=four)),
        Row("anchors", "INT4 + 2%", anchored(four, 0.02)),
        Row("anchors", "INT2 + 5% INT8", anchored(two, 0.05, **int8)),
        Row("anchors", "INT4 + 2% INT8", anchored(four, 0.02, **int8)),
        Row("anchors", "INT3", Setting(tier=three)),
        Row("pages", "INT2, third plane on 25% of pages", Setting(tier=two), third=0.25),
        Row("pages", "INT2, third plane on 50% of pages", Setting(tier=two), third=0.5),
        Row("anchors", "INT2 + 5% by linear proxy", anchored(two, 0.05, score="linear")),
        Row("anchors", "INT2 + 1%", anchored(two, 0.01)),
        Row("anchors", "INT2 + 2%", anchored(two, 0.02)),
        Row("anchors", "INT2 + 10%", anchored(two, 0.1)),
        Row("anchors", "INT3 + 2%", anchored(three, 0.02)),
        Row("anchors", "INT3 + 5%", anchored(three, 0.05)),
        Row("anchors", "INT4 + 5%", anchored(four, 0.05)),
        Row("anchors", "INT3 + 2% INT8", anchored(three, 0.02, **int8)),
        Row("anchors", "INT3 + 5% INT8", anchored(three, 0.05, **int8)),
        Row("anchors", "INT2 + 10% INT8", anchored(two, 0.1, **int8)),
        Row("pages", "INT2, third plane on 75% of pages", Setting(tier=two), third=0.75),
        Row("pages", "INT2 + 2% INT8, third plane on 25% of pages", anchored(two, 0.02, **int8), third=0.25),
        Row("pages", "INT2 + 2% INT8, third plane on 50% of pages", anchored(two, 0.02, **int8), third=0.5),
        Row("alone", "5% and nothing else", anchored(two, 0.05, alone=True)),
        Row("alone", "10% and nothing else", anchored(two, 0.1, alone=True)),
        Row("turns", "INT2", Setting(tier=two), "turns"),
        Row("turns", "INT2 + 5%", anchored(two, 0.05, refresh=64), "turns"),
        Row("turns", "INT2 + 5%, frozen", anchored(two, 0.05), "turns"),
        Row("turns", "INT2 + 5% INT8", anchored(two, 0.05, refresh=64, **int8), "turns"),
    ]
    rows += [
        Row("window", f"{t.name} + {r:.0%}, window {w}", anchored(t, r, w)) for t, r in ((two, 0.05), (four, 0.05)) for w in (128, 256)
    ]
    return rows


@dataclass(frozen=True, slots=True)
class ThirdPlanes:
    """A policy's plan, with INT3 where it says INT2 on the `share` of the body's pages that have most mass. mass: of the pages that were
    there when it was measured; newer ones have none."""

    inner: Any
    share: float
    mass: tuple[float, ...]

    @property
    def name(self) -> str:
        return str(self.inner.name)

    def plan(self, spans: Sequence[Span], num_tokens: int, signals: Signals, budget: Budget | None = None) -> Plan:
        plan = self.inner.plan(spans, num_tokens, signals, budget)
        # the choice is made once: what settled at INT2 cannot rise
        pages = [p for p in range(len(self.mass)) if p < len(plan.tiers) and plan.tiers[p] is Tier.INT2]
        raised = set(sorted(pages, key=lambda p: -self.mass[p])[: round(self.share * len(pages))])
        return replace(plan, tiers=tuple(Tier.INT3 if p in raised else t for p, t in enumerate(plan.tiers)))


def run_row(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, row: Row, task: Task, reference: Reference) -> dict[str, Any]:
    """One row on one conversation, as JSON."""
    prefill = reference.prefill
    session = Session(model, tokenizer, capacity_tokens=len(task.conversation) + SLACK, **row.setting.session_arguments())
    if row.third:
        assert prefill is not None
        mass = page_mass(prefill.queries, [k[0] for k in prefill.keys], prefill.scale)
        settled = session.store.first_window_page(len(prefill.token_ids))
        session.policy = ThirdPlanes(session.policy, row.third, tuple(mass[:settled].tolist()))
    with session, replayed(model, prefill):
        outcome = run_session(session, task, reference)
        last = session.report
        queries = last.bytes_queries
        told = {"anchors": last.anchors, "promoted": last.anchors_promoted, "query_bytes": queries}
    return record(row.group, row.label, task, outcome) | told | {"protocol": row.protocol}


# from one forward pass


def what_is_kept() -> list[Kept]:
    planes, paper = make_codec("planes"), make_codec("hyquant")
    whole = partial(Kept, sinks=True, window=64)
    kept = [whole("INT8", planes, Tier.INT8), Kept("INT4, no sinks, no window", planes, Tier.INT4)]
    kept += [Kept("INT4, no sinks", planes, Tier.INT4, window=64)]
    for tier in (Tier.INT4, Tier.INT2):
        kept += [whole(f"{tier.name}{f' + {r:.0%}' if r else ''}", planes, tier, rho=r) for r in (0.0, 0.01, 0.05)]
    kept += [whole(f"paper's INT4 tiles{f' + {r:.0%}' if r else ''}", paper, Tier.INT4, rho=r) for r in (0.0, 0.05)]
    return kept


def anchor_formats() -> list[Kept]:
    """Anchors of eight bits in one format and another: the store's own, and those that scale each token or each page of 32."""
    codecs = {"BF16": None, "INT8": "planes", "int8, a scale a token": "int8", "FP8 e4m3": "hyquant-fp"}
    planes, whole = make_codec("planes"), partial(Kept, sinks=True, window=64)
    return [
        whole(f"{tier.name} + {rho:.0%} {label}", planes, tier, rho=rho, anchors=make_codec(name) if name else None)
        for tier, rho in ((Tier.INT2, 0.05), (Tier.INT4, 0.02))
        for label, name in codecs.items()
    ]


def attention_of(
    model: PreTrainedModel, conversation: Conversation, kept: Sequence[Kept], lengths: Sequence[int] = LENGTHS
) -> tuple[list[dict[str, float]], dict[int, dict[str, list[float]]]]:
    """Coverage of each layer, and by length and what is kept the error of each layer's output."""
    covered: list[dict[str, float]] = []
    errors: dict[int, dict[str, list[float]]] = {n: {x.label: [] for x in kept} for n in lengths if n + 64 <= len(conversation)}

    def see(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        covered.append(coverage(q, k, scale))
        for n, of in errors.items():
            for x in kept:
                of[x.label].append(output_error(q, k, v, scale, n, x))

    with captured(model, see), torch.inference_mode():
        model(torch.tensor([conversation.token_ids]), logits_to_keep=1)
    return covered, errors


# along a long generation


def generation_rows() -> list[Row]:
    two = Tier.INT2
    return [
        Row("generation", "INT2", Setting(tier=two)),
        Row("generation", "INT2 + 5%, frozen", anchored(two, 0.05)),
        Row("generation", "INT2 + 5%, every 64", anchored(two, 0.05, refresh=64)),
        Row("generation", "INT2 + 5%, every 16", anchored(two, 0.05, refresh=16)),
        Row("generation", "INT2 + 5%, every 256", anchored(two, 0.05, refresh=256)),
    ]


# the study


def main(
    out: Annotated[Path, typer.Option(help="Results without an ending: OUT.json and OUT.md are written.")],
    model: str = "qwen05",
    rows: Annotated[str, typer.Option(help=f"Groups of rows: {', '.join(GROUPS)}.")] = ",".join(GROUPS),
    source: Annotated[str, typer.Option(help="Source of conversations.")] = SOURCE,
    places: Annotated[str, typer.Option(help="Which of its conversations.")] = PLACES,
    only: Annotated[str, typer.Option(help="Labels of rows to run, separated by semicolons; all by default.")] = "",
    generated: Annotated[int, typer.Option(help="Tokens of the long generation.")] = GENERATED,
    again: Annotated[bool, typer.Option(help="Run rows that OUT.json holds already, and replace them.")] = False,
    device: Device = "cpu",
) -> None:
    at, groups = [int(x) for x in places.split(",")], rows.split(",")
    data = study_file.begun(out, runs=[])
    loaded, tokenizer = load(model, device=device)
    traces = load_traces(source, max(at) + 1).traces
    name = Path(model).name

    def chosen(all_rows: Sequence[Row]) -> list[Row]:
        return [r for r in all_rows if r.group in groups and (not only or r.label in only.split(";"))]

    for trace in (traces[i] for i in at):
        study(loaded, tokenizer, name, trace, chosen(make_rows()), data, out, again)
        for group, kept in (("error", what_is_kept()), ("formats", anchor_formats())):
            if group in groups or (group == "error" and "coverage" in groups):
                from_one_pass(loaded, tokenizer, name, trace, group, kept, data, out)
        generate(loaded, tokenizer, name, trace, chosen(generation_rows()), generated, data, out, again)


def study(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    trace: Trace,
    rows: Sequence[Row],
    data: dict[str, Any],
    out: Path,
    again: bool = False,
) -> None:
    """Run what is missing of `rows`, or all of them again, on one conversation."""
    missing = [r for r in rows if again or not _has(data, name, trace.id, r.group, r.label)]
    for protocol in dict.fromkeys(r.protocol for r in missing):
        task = make_task(protocol, render(tokenizer, trace))
        reference = run_reference(model, task)
        for row in (r for r in missing if r.protocol == protocol):
            add(data, out, {"model": name} | run_row(model, tokenizer, row, task, reference))


def from_one_pass(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, trace: Trace, group: str, kept: Sequence[Kept],
    data: dict[str, Any], out: Path,
) -> None:  # fmt: skip
    """Errors of what is kept, as rows of `group`, and coverage, which comes with the group "error"."""
    coverage_is_there = _has(data, name, trace.id, "coverage", "coverage")
    if coverage_is_there and (group == "error" or any(_has(data, name, trace.id, group, f"{n}") for n in LENGTHS)):
        return
    conversation = render(tokenizer, trace)
    covered, errors = attention_of(model, conversation, kept)
    base = {"model": name, "trace": trace.id, "tokens": len(conversation)}
    mean = {key: float(np.mean([c[key] for c in covered])) for key in covered[0]}
    for n, of in errors.items():
        add(
            data,
            out,
            base | {"group": group, "label": f"{n}", "mse": {label: float(np.mean(x)) for label, x in of.items()}, "layers": of},
        )
    if not coverage_is_there:
        add(data, out, base | {"group": "coverage", "label": "coverage", "share": mean})


def generate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, trace: Trace, rows: Sequence[Row], count: int,
    data: dict[str, Any], out: Path, again: bool = False,
) -> None:  # fmt: skip
    """Run what is missing of `rows`, or all of them again, along one long reply."""
    missing = [r for r in rows if again or not _has(data, name, trace.id, r.group, r.label)]
    if not missing:
        return
    context = reporting(tokenizer, trace)
    reference, tokens = continue_greedily(model, context, count)
    text = str(tokenizer.decode(tokens))
    for row in missing:
        kl = along(model, row.setting, reference, tokens)
        parts = [float(np.mean(kl[i : i + 64])) for i in range(0, len(kl), 64)]
        run = {"model": name, "trace": trace.id, "tokens": len(context), "group": row.group, "label": row.label, "scored": len(kl)}
        add(data, out, run | {"kl": float(np.mean(kl)), "parts": parts, "text": text})


def _has(data: dict[str, Any], model: str, trace: str, group: str, label: str) -> bool:
    return (model, trace, group, label) in {key(r) for r in data["runs"]}


def key(run: dict[str, Any]) -> tuple[str, str, str, str]:
    return run["model"], run["trace"], run["group"], run["label"]


def add(data: dict[str, Any], out: Path, run: dict[str, Any]) -> None:
    """Both files, whole or not at all, with what another run of the study has added since."""
    data["runs"] = [r for r in data["runs"] if key(r) != key(run)] + [run]
    print(*key(run), f"KL {run['kl']:.4f}" if "kl" in run else "", f"{run['bits']:.2f} bits" if "bits" in run else "", flush=True)
    study_file.save(data, out, key, markdown)


# tables


def markdown(data: dict[str, Any]) -> str:
    """A table for each group and model, and the figures we hold ourselves to."""
    runs, tables = data["runs"], []
    scored = [r for r in runs if "bits" in r]
    for group, model in dict.fromkeys((r["group"], r["model"]) for r in sorted(scored, key=lambda r: GROUPS.index(r["group"]))):
        mine = [r for r in scored if (r["group"], r["model"]) == (group, model)]
        traces = sorted({r["trace"] for r in mine})
        # rows are compared on the same conversations only: on all of them together, and on each
        for these in ([traces] if len(traces) > 1 else []) + [[t] for t in traces]:
            of = {x: [r for r in mine if r["label"] == x and r["trace"] in these] for x in dict.fromkeys(r["label"] for r in mine)}
            rows = [pooled(x) | _more(x) for x in of.values() if len(x) == len(these)]
            tables.append((group, f"{model}, {mine[0]['protocol']}, {' and '.join(these)}", sorted(rows, key=lambda r: r["bits"])))
    tables = [t for t in tables if t[2]]
    rest = {group: [r for r in runs if r["group"] == group] for group in ("coverage", "error", "formats", "generation")}
    return study_file.render("hyquant.md.j2", tables=tables, verdicts=verdicts(runs), overhead=overhead(), **rest)


def _more(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {x: sum(r[x] for r in runs) / len(runs) for x in ("anchors", "promoted", "query_bytes")}


def verdicts(runs: Sequence[dict[str, Any]]) -> list[str]:
    """The figures: met or missed, on conversations of 4,000 tokens and more that have both rows."""
    long = [r for r in runs if r["group"] in ("anchors", "turns") and r["tokens"] >= 4000 and r["model"] == "qwen05"]
    lines = []
    for group, body, rho, most in (("anchors", "INT2", "5%", 0.4), ("turns", "INT2", "5%", 0.4), ("anchors", "INT4", "2%", 0.7)):
        labels = (body, f"{body} + {rho}", f"{body} + {rho} INT8")
        of = {x: {r["trace"]: r for r in long if (r["group"], r["label"]) == (group, x)} for x in labels}
        both = set(of[labels[0]]) & set(of[labels[1]])
        if both:
            plain, anchors = (pooled([of[x][t] for t in sorted(both)]) for x in labels[:2])
            ratio = anchors["kl"] / plain["kl"]
            line = f"{labels[1]} ({group}, conversations: {len(both)}): KL at most {most} of {body}'s: {anchors['kl']:.4f} at "
            line += f"{anchors['bits']:.2f} bits against {plain['kl']:.4f} at {plain['bits']:.2f}, ratio {ratio:.3f}: "
            lines.append(line + ("met" if ratio <= most else "MISSED"))
        all_three = both & set(of[labels[2]])
        if all_three:
            plain, anchors, coarse = (pooled([of[x][t] for t in sorted(all_three)]) for x in labels)
            lost = (coarse["kl"] - anchors["kl"]) / (plain["kl"] - anchors["kl"])
            paid = (coarse["bits"] - plain["bits"]) / (anchors["bits"] - plain["bits"])
            lines.append(
                f"{labels[2]} ({group}, conversations: {len(all_three)}): loses less than a tenth of that gain: {lost:.1%}: "
                f"{'met' if lost < 0.1 else 'MISSED'}; takes half of its bytes: {paid:.0%}: {'met' if paid <= 0.5 else 'MISSED'}"
            )
    share = next(r["over_strict"] for r in overhead() if (r["tokens"], r["tier"], r["anchors"]) == (32768, "INT2", "INT8"))
    lines.append(f"INT8 anchors, INT2 tail, 32k: {share:+.1%} against strict INT4, at most +17.4%: {'met' if share < 0.174 else 'MISSED'}")
    return lines


if __name__ == "__main__":
    typer.run(main)
