"""Policy strata beside triaxial and uniform at the same budgets, on conversations of 4,000 tokens and more.

python -m kvstrata.eval.strata_study --out docs/results/strata [--model qwen05] [--rows budgets,facts] [--places 0,2,20]
writes OUT.json after each run and OUT.md from it. Runs that OUT.json holds already are not made again. Protocol "oneshot": one prefill
stored once, the last 400 tokens scored, or, of
group facts, the answers to questions on a deep-research conversation. Knows nothing of how a setting is run.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstrata.eval import study as study_file
from kvstrata.eval.conversation import render
from kvstrata.eval.evaluate import run
from kvstrata.eval.intent_study import research_task
from kvstrata.eval.models import Device, load
from kvstrata.eval.protocols import make_task, run_reference
from kvstrata.eval.quality_study import ASKED
from kvstrata.eval.results import Setting
from kvstrata.eval.study import pooled, record
from kvstrata.eval.traces import load_traces
from kvstrata.ops.score import NUM_QUERIES
from kvstrata.policy.profile import load_profile
from kvstrata.types import Tier

SOURCE = "bfcl:multi_turn_base"
PLACES = "0,2,20"
"""Conversations of 4,000 tokens and more that neither the shipped profile nor the policy's defaults have seen."""
FIGURES = ((3.0, 0.011), (3.25, 0.007), (3.8, 0.0035))
"""Budgets in real bits, and the KL that was asked for there."""
THINNED = (1.0, 1.5, 2.0)
"""Budgets in real bits below what all pages take at the lowest tier."""
RHO = (0.0, 0.01, 0.02, 0.05)
"""Shares of anchors."""
ANCHORED = (3.0, 3.5, 4.5, 5.4)
"""Budgets in real bits at which anchors are judged."""
POWERS = ((0.2, 0.4), (0.4, 0.25), (0.4, 0.4), (0.4, 0.6), (0.4, 0.8), (0.4, 1.0), (0.3, 0.8), (0.6, 0.4), (0.6, 0.6), (0.6, 0.8))
"""(trust, contrast) that the defaults were chosen from, on other conversations than PLACES: 4, 5, 7 and 8."""
GROUPS = "budgets,ablations,default,thinned,facts,quality,anchors,powers"
RESEARCH = "student:8000"


@dataclass(frozen=True)
class Row:
    """A named setting. group: the table it belongs to."""

    group: str
    label: str
    setting: Setting
    facts: bool = False
    """Judged by facts of deep-research conversations, not on SOURCE."""


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
            Row("ablations", f"pages by intent, {bits:g}", strata(bits, profile, intent=0.3)),
        ]
    rows += [Row("default", f"role, {bits:g}", Setting("role", budget_bits=bits)) for bits in (*(b for b, _ in FIGURES), 4.5)]
    rows += [Row("default", f"strata, {bits:g}, default profile", strata(bits, "default")) for bits in (3.25, 4.5)]
    rows += [Row("default", "role, no budget", Setting("role")), Row("default", "strata, no budget", Setting("strata"))]
    for bits in THINNED:
        for facts in (False, True):
            rows += thinned(bits, profile, facts)
    rows += [Row("facts", "full", Setting("full"), True), Row("facts", "uniform INT4", Setting(tier=Tier.INT4), True)]
    for bits in (3.0, 4.0):
        rows += [
            Row("facts", f"strata, {bits:g}, facts", strata(bits, profile), True),
            Row("facts", f"uniform, {bits:g}, facts", Setting(budget_bits=bits), True),
            Row("facts", f"triaxial, {bits:g}, facts", Setting("triaxial", budget_bits=bits, options=(("profile", profile),)), True),
        ]
    for bits in ANCHORED:
        rows += [Row("anchors", f"strata, {share:.0%} anchors, {bits:g}", strata(bits, profile, rho=(share,))) for share in RHO]
        rows += [Row("anchors", f"strata, anchors as it chooses, {bits:g}", strata(bits, profile, rho=RHO))]
    for bits in (2.6, 3.0, 3.5, 4.5, 5.4):
        rows += [Row("powers", f"trust {t:g}, contrast {c:g}, {bits:g}", strata(bits, profile, trust=t, contrast=c)) for t, c in POWERS]
    if load_profile(profile).law is not None:
        rows += [Row("quality", f"strata, KL {q:g}", Setting("strata", quality=q, options=(("profile", profile),))) for q in ASKED]
    return rows


def thinned(bits: float, profile: str, facts: bool) -> list[Row]:
    """At budgets below the lowest tier. On SOURCE, nine tenths of which are instructions, nothing is spared."""
    group, end = ("facts", f"{bits:g}, facts") if facts else ("thinned", f"{bits:g}, nothing spared")
    spare = ("inst",) if facts else ()

    def row(label: str, setting: Setting) -> Row:
        return Row(group, f"{label}, {end}", setting, facts)

    def kept(policy: str, tier: Tier, **options: Any) -> Row:
        return row(f"{policy} {tier.name}", Setting(policy, budget_bits=bits, options=(("tier", tier), *options.items())))

    return [
        row("strata", strata(bits, profile, spare=spare)),
        row("strata by intent", strata(bits, profile, spare=spare, score="intent", intent=0.3)),
        row("strata, whole pages", strata(bits, profile, spare=spare, thin=False)),
        row("strata, regret 1", strata(bits, profile, spare=spare, regret=1.0)),
        *(kept(policy, Tier.INT2, spare=spare) for policy in ("intentkv", "snapkv", "streaming")),
        kept("intentkv", Tier.INT4, spare=spare),
        kept("window", Tier.INT2),
    ]


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
    rows: Annotated[str, typer.Option(help=f"Groups of rows: {GROUPS}.")] = "budgets,ablations",
    places: Annotated[str, typer.Option(help=f"Which conversations of {SOURCE}.")] = PLACES,
    profile: Annotated[str, typer.Option(help="The model's own profile.")] = "qwen05",
    only: Annotated[str, typer.Option(help="Labels of rows to run, separated by semicolons; all by default.")] = "",
    device: Device = "cpu",
    research: Annotated[str, typer.Option(help="Conversations of group facts: SCENARIO:TOKENS, separated by commas.")] = RESEARCH,
) -> None:
    data = study_file.begun(out, model=Path(model).name, runs=[])
    wanted = [r for r in make_rows(profile) if r.group in rows.split(",") and (not only or r.label in only.split(";"))]
    loaded, tokenizer = load(model, device=device)
    chosen = [int(x) for x in places.split(",") if x]
    traces = load_traces(SOURCE, max(chosen, default=0) + 1).traces
    told = [(False, traces[place]) for place in chosen]
    if any(r.facts for r in wanted):
        told += [(True, load_traces(f"research:{name}").traces[0]) for name in research.split(",") if name]
    for facts, trace in told:
        done = {r["label"] for r in data["runs"] if r["trace"] == trace.id}
        missing = [r for r in wanted if r.facts is facts and r.label not in done]
        if not missing:
            continue
        task = research_task(tokenizer, trace, "oneshot") if facts else make_task("oneshot", render(tokenizer, trace))
        # what is evicted may be chosen by any query of the reading
        reference = run_reference(loaded, task, queries=len(task.conversation) if facts else NUM_QUERIES)
        for row in missing:
            try:
                outcome = run(loaded, tokenizer, row.setting, task, reference)
            except (ValueError, RuntimeError) as error:  # RuntimeError: out of frames, out of memory
                print(f"{trace.id} {row.label}: {error}", flush=True)
                continue
            last = record(row.group, row.label, task, outcome)
            data["runs"].append(last)
            study_file.save(data, out, lambda r: (r["trace"], r["label"]), markdown)
            found = f", {last['facts_hit']} of {len(last['fact_logp'])} facts" if last["fact_logp"] else ""
            print(f"{trace.id} {row.label}: {last['bits']:.2f} bits, KL {last['kl']:.4f}{found}", flush=True)


if __name__ == "__main__":
    typer.run(main)
