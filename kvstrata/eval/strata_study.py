"""Policy strata beside triaxial and uniform at the same budgets, on conversations of 4,000 tokens and more.

python -m kvstrata.eval.strata_study --out docs/results/strata [--model qwen05] [--rows budgets,ablations] [--places 0,2,20]
writes OUT.json after each run and OUT.md from it. Runs that OUT.json holds already are not made again. Protocol "oneshot": one prefill
stored once, the last 400 tokens scored. Knows nothing of how a setting is run.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstrata.eval import study as study_file
from kvstrata.eval.conversation import render
from kvstrata.eval.evaluate import run
from kvstrata.eval.models import Device, load
from kvstrata.eval.protocols import make_task, run_reference
from kvstrata.eval.results import Setting
from kvstrata.eval.study import pooled, record
from kvstrata.eval.traces import load_traces
from kvstrata.types import Tier

SOURCE = "bfcl:multi_turn_base"
PLACES = "0,2,20"
"""Conversations of 4,000 tokens and more that neither the shipped profile nor the policy's defaults have seen."""
FIGURES = ((3.0, 0.011), (3.25, 0.007), (3.8, 0.0035))
"""Budgets in real bits, and the KL that was asked for there."""


@dataclass(frozen=True)
class Row:
    """A named setting. group: the table it belongs to."""

    group: str
    label: str
    setting: Setting


def strata(bits: float, profile: str, **options: Any) -> Setting:
    return Setting("strata", budget_bits=bits, options=(("profile", profile), *options.items()))


def make_rows(profile: str) -> list[Row]:
    """profile: the model's own."""
    rows = [Row("budgets", f"strata, {bits:g}", strata(bits, profile)) for bits, _ in FIGURES]
    rows += [
        Row("budgets", f"triaxial, {bits:g}", Setting("triaxial", budget_bits=bits, options=(("profile", profile),))) for bits, _ in FIGURES
    ]
    rows += [Row("budgets", f"uniform, {bits:g}", Setting(budget_bits=bits)) for bits, _ in FIGURES]
    rows += [Row("budgets", f"{tier.name} everywhere, no window", Setting(tier=tier, window=0)) for tier in (Tier.INT3, Tier.INT4)]
    for bits in (3.0, 3.8):
        rows += [
            Row("ablations", f"tags alone, {bits:g}", strata(bits, profile, trust=0.0)),
            Row("ablations", f"losses as they seem (contrast 1), {bits:g}", strata(bits, profile, contrast=1.0)),
            Row("ablations", f"default profile, {bits:g}", strata(bits, "default")),
        ]
    return rows


def verdicts(runs: list[dict[str, Any]]) -> list[str]:
    """The figures, met or missed, over the conversations that were run."""
    lines = []
    for bits, asked in FIGURES:
        mine = [r for r in runs if r["label"] == f"strata, {bits:g}"]
        if not mine:
            continue
        p = pooled(mine)
        line = f"KL at most {asked} at {bits:g} bits: {p['kl']:.4f} at {p['bits']:.2f}, {len(mine)} conversations"
        worst = max(mine, key=lambda r: r["kl"])
        line += f" (from {min(r['kl'] for r in mine):.4f} to {worst['kl']:.4f}): {'met' if p['kl'] <= asked else 'MISSED'}"
        theirs = [r for r in runs if r["label"] == f"triaxial, {bits:g}" and r["trace"] in {m["trace"] for m in mine}]
        if len(theirs) == len(mine):
            line += f"; triaxial at the same budget {pooled(theirs)['kl']:.4f}"
        lines.append(line)
    return lines


def markdown(data: dict[str, Any]) -> str:
    runs: list[dict[str, Any]] = data["runs"]
    tables = []
    for group in dict.fromkeys(r["group"] for r in runs):
        labels = dict.fromkeys(r["label"] for r in runs if r["group"] == group)
        rows = [pooled([r for r in runs if r["label"] == label]) for label in labels]
        most = max(row["runs"] for row in rows)
        for row in rows:
            # means over other conversations are no neighbours of the rest
            if row["runs"] < most:
                row["label"] += f" ({row['runs']} of {most} conversations)"
        tables.append((group, f"{most} conversation{'s' * (most > 1)}", rows))
    return study_file.render("strata.md.j2", model=data["model"], tables=tables, verdicts=verdicts(runs), runs=runs)


def main(
    out: Annotated[Path, typer.Option(help="Results without an ending: OUT.json and OUT.md are written.")],
    model: str = "qwen05",
    rows: Annotated[str, typer.Option(help="Groups of rows: budgets, ablations.")] = "budgets,ablations",
    places: Annotated[str, typer.Option(help=f"Which conversations of {SOURCE}.")] = PLACES,
    profile: Annotated[str, typer.Option(help="The model's own profile.")] = "qwen05",
    only: Annotated[str, typer.Option(help="Labels of rows to run, separated by semicolons; all by default.")] = "",
    device: Device = "cpu",
) -> None:
    path = out.with_suffix(".json")
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"model": Path(model).name, "runs": []}
    wanted = [r for r in make_rows(profile) if r.group in rows.split(",") and (not only or r.label in only.split(";"))]
    loaded, tokenizer = load(model, device=device)
    chosen = [int(x) for x in places.split(",")]
    traces = load_traces(SOURCE, max(chosen) + 1).traces
    for place in chosen:
        done = {r["label"] for r in data["runs"] if r["trace"] == traces[place].id}
        missing = [r for r in wanted if r.label not in done]
        if not missing:
            continue
        task = make_task("oneshot", render(tokenizer, traces[place]))
        reference = run_reference(loaded, task)
        for row in missing:
            data["runs"].append(record(row.group, row.label, task, run(loaded, tokenizer, row.setting, task, reference)))
            study_file.save(data, out, lambda r: (r["trace"], r["label"]), markdown)
            print(f"{traces[place].id} {row.label}: {data['runs'][-1]['bits']:.2f} bits, KL {data['runs'][-1]['kl']:.4f}", flush=True)


if __name__ == "__main__":
    typer.run(main)
