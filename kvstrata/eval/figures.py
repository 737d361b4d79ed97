"""The project's figures of quality: our codec and the papers' on the same conversations, in both protocols, at their real bits.

python -m kvstrata.eval.figures --out docs/results/skeleton [--model qwen05] [--traces bfcl:multi_turn_base] [--limit 4]
writes OUT.json and OUT.md, after each protocol. Knows nothing of how a setting is run.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from kvstrata.eval.evaluate import evaluate
from kvstrata.eval.metrics import join
from kvstrata.eval.models import load
from kvstrata.eval.protocols import PROTOCOLS
from kvstrata.eval.report import figure
from kvstrata.eval.results import Result, Setting
from kvstrata.eval.table import percent
from kvstrata.eval.traces import load_traces
from kvstrata.types import Tier

SETTINGS = (
    Setting("full", dense_dtype="float32"),
    Setting("full", dense_dtype="bfloat16"),
    *(Setting(tier=t) for t in (Tier.INT8, Tier.INT4, Tier.INT3, Tier.INT2)),
    Setting("role"),
    *(Setting(tier=t, codec="kivi") for t in (Tier.INT4, Tier.INT2)),
    *(Setting(tier=t, codec="triaxial") for t in (Tier.INT4, Tier.INT2)),
    *(Setting(tier=t, codec="hyquant") for t in (Tier.INT8, Tier.INT4)),
    Setting(tier=Tier.INT8, codec="fp8"),
    Setting(tier=Tier.INT8, codec="int8"),
)
GATES = {"uniform INT4": (0.004, 5.2), "uniform INT3": (0.008, 4.1), "uniform INT2": (0.04, 3.0), "full float32": (1e-5, 33.0)}
"""Highest mean KL and highest real bits that we hold ourselves to."""


def name_of(result: Result) -> str:
    return f"{result.label} {result.dense_dtype}" if result.policy == "full" else result.label


def gates(results: Sequence[Result]) -> list[str]:
    """One line for each gate: met or missed."""
    lines = []
    for r in results:
        if name_of(r) in GATES:
            kl, bits = GATES[name_of(r)]
            verdict = "met" if r.kl_mean <= kl and r.bits_per_element <= bits else "MISSED"
            lines.append(
                f"- {name_of(r)}: KL {figure(r.kl_mean)} (at most {kl:g}) at {r.bits_per_element:.2f} bits (at most {bits:g}): {verdict}"
            )
    return lines


def markdown(model: str, traces: str, results: dict[str, Sequence[Result]]) -> str:
    """A table for each protocol, then the gates."""
    out = [f"# Figures: {model} on {traces}", "", "Made by `python -m kvstrata.eval.figures`. Every setting but `full` keeps the first page and the",
           "recent window of 64 to 127 tokens at BF16. Bits are real: all that the arena's frames hold. KL in nats against the uncompressed",
           "model in float32; tool calls: the same over the tokens of calls alone; calls kept: every token's most likely choice agrees."]  # fmt: skip
    for protocol, rows in results.items():
        scores = join(o.scores for o in rows[0].outcomes)
        contexts = ", ".join(f"{o.tokens:,}" for o in rows[0].outcomes)
        out += ["", f"## {protocol}", "", f"{len(rows[0].outcomes)} conversations of {contexts} tokens; {len(scores)} tokens scored, "
                f"{len(scores.tool_calls)} of them in tool calls.", "",
                "| setting | bits | KL | KL p95 | top-1 | NLL | tool-call KL | tool-call top-1 | calls kept |", "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
        for r in rows:
            kept, calls = r.calls_kept
            cells = [name_of(r), f"{r.bits_per_element:.2f}", figure(r.kl_mean), figure(r.kl_p95), percent(r.top1), f"{r.nll_delta:+.4f}",
                     figure(r.tool_call_kl), percent(r.tool_call_top1), f"{kept}/{calls}"]  # fmt: skip
            out.append("| " + " | ".join(cells) + " |")
        out += ["", *gates(rows)]
    return "\n".join(out) + "\n"


def main(
    out: Annotated[Path, typer.Option(help="Results without an ending: OUT.json and OUT.md are written.")],
    model: str = "qwen05",
    traces: str = "bfcl:multi_turn_base",
    limit: int = 4,
    protocol: Annotated[list[str] | None, typer.Option(help="oneshot, turns; both by default.")] = None,
) -> None:
    loaded, tokenizer = load(model)
    found = load_traces(traces, limit)
    results: dict[str, Sequence[Result]] = {}
    for each in protocol or reversed(PROTOCOLS):
        name = Path(model).name
        done = evaluate(
            loaded, tokenizer, found.traces, SETTINGS, name=name, protocol=each, needles=0,
            progress=lambda what, n, total: print(f"{each} {n}/{total} {what}", flush=True),
        )  # fmt: skip
        for line in (*found.errors, *done.errors):
            print(f"error: {line}")
        results[each] = done.results
        records = {p: [r.to_dict() | {"setting": name_of(r), "calls_kept": r.calls_kept} for r in rows] for p, rows in results.items()}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.with_suffix(".json").write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
        out.with_suffix(".md").write_text(markdown(name, traces, results), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
