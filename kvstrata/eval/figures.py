"""The project's figures of quality: our codec and the papers' on the same conversations, in both protocols, at their real bits.

python -m kvstrata.eval.figures --out docs/results/skeleton [--model qwen05] [--traces bfcl:multi_turn_base] [--limit 4]
writes OUT.json and OUT.md, after each conversation. Knows nothing of how a setting is run.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from jinja2 import Environment, PackageLoader, StrictUndefined

from kvstrata.eval.evaluate import evaluate
from kvstrata.eval.metrics import join
from kvstrata.eval.models import Device, load
from kvstrata.eval.protocols import PROTOCOLS
from kvstrata.eval.report import figure
from kvstrata.eval.results import Result, Setting, summarize
from kvstrata.eval.table import percent
from kvstrata.eval.traces import load_traces
from kvstrata.types import Tier

SETTINGS = (
    Setting("full", dense_dtype="float32"),
    *(Setting(tier=t) for t in (Tier.INT4, Tier.INT3, Tier.INT2)),
    Setting("role"),
    *(Setting(tier=t, codec="kivi") for t in (Tier.INT4, Tier.INT2)),
    *(Setting(tier=t, codec="triaxial") for t in (Tier.INT4, Tier.INT2)),
    *(Setting(tier=t, codec="hyquant") for t in (Tier.INT8, Tier.INT4)),
    Setting(tier=Tier.INT8, codec="fp8"),
    Setting(tier=Tier.INT8, codec="int8"),
)
GATES = {"uniform INT4": (0.004, 5.2), "uniform INT3": (0.008, 4.1), "uniform INT2": (0.04, 3.0), "full": (1e-5, 33.0)}
"""Highest mean KL and highest real bits that we hold ourselves to."""


def gates(results: Sequence[Result]) -> list[str]:
    """One line for each gate: met or missed."""
    lines = []
    for r in results:
        if r.label in GATES:
            kl, bits = GATES[r.label]
            verdict = "met" if r.kl_mean <= kl and r.bits_per_element <= bits else "MISSED"
            lines.append(
                f"{r.label}: KL {figure(r.kl_mean)} (at most {kl:g}) at {r.bits_per_element:.2f} bits (at most {bits:g}): {verdict}"
            )
    return lines


def markdown(model: str, traces: str, results: dict[str, Sequence[Result]]) -> str:
    """A table for each protocol, then its gates."""
    environment = Environment(
        loader=PackageLoader("kvstrata.eval"), undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"figure": figure, "percent": percent, "gates": gates}
    scores = {protocol: join(o.scores for o in rows[0].outcomes) for protocol, rows in results.items()}
    scored = {protocol: (len(s), len(s.tool_calls)) for protocol, s in scores.items()}
    return environment.get_template("figures.md.j2").render(model=model, traces=traces, results=results, scored=scored)


def main(
    out: Annotated[Path, typer.Option(help="Results without an ending: OUT.json and OUT.md are written.")],
    model: str = "qwen05",
    traces: str = "bfcl:multi_turn_base",
    limit: int = 4,
    protocol: Annotated[list[str] | None, typer.Option(help="oneshot, turns; both by default.")] = None,
    device: Device = "cpu",
) -> None:
    loaded, tokenizer = load(model, device=device)
    found = load_traces(traces, limit)
    name = Path(model).name
    results: dict[str, Sequence[Result]] = {}
    out.parent.mkdir(parents=True, exist_ok=True)
    for each in protocol or reversed(PROTOCOLS):
        for trace in found.traces:

            def say(what: str, done: int, total: int, protocol: str = each) -> None:
                print(f"{protocol} {done}/{total} {what}", flush=True)

            done = evaluate(loaded, tokenizer, [trace], SETTINGS, name=name, protocol=each, needles=0, progress=say)
            for line in done.errors:
                print(f"error: {line}", flush=True)
            if not done.errors:
                results[each] = joined(results.get(each), done.results)
            # hours may pass: what is known is on disk after each conversation
            records = {p: [r.to_dict() | {"setting": r.label, "calls_kept": r.calls_kept} for r in rows] for p, rows in results.items()}
            out.with_suffix(".json").write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
            out.with_suffix(".md").write_text(markdown(name, traces, results), encoding="utf-8")


def joined(before: Sequence[Result] | None, now: Sequence[Result]) -> list[Result]:
    """Results of the same settings on more conversations."""
    if before is None:
        return list(now)
    pairs = zip(SETTINGS, before, now, strict=True)
    return [summarize(a.model, s, a.protocol, a.outcomes + b.outcomes, a.facts + b.facts) for s, a, b in pairs]


if __name__ == "__main__":
    typer.run(main)
