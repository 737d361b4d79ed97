"""One HTML page of the comparison: Pareto fronts of ours and every peer, and what became of one conversation's tokens.

Needs no network and no script. Knows nothing of how the results were made.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from kvstrata.eval.pareto import ParetoChart, Point, outline, pareto_chart
from kvstrata.eval.peers.compare import not_run, pools, verdicts
from kvstrata.eval.peers.rows import OURS
from kvstrata.eval.report import figure
from kvstrata.eval.token_map import LANE, LETTERS, ROW, rows_of, turn_chart
from kvstrata.eval.watched import Watched
from kvstrata.types import Role, Tier


@dataclass(frozen=True)
class Measure:
    """Of a run. log: shown on a logarithmic scale; low: less is better; digits: how it is written; wide: over the whole page; sign: it is
    shown times this."""

    key: str
    title: str
    about: str
    log: bool
    low: bool
    digits: str
    wide: bool = False
    sign: float = 1.0


MEASURES = (
    Measure("kl", "Loss", "KL against the uncompressed cache, nats; lower is better", True, True, "{:.4f}", True),
    Measure("call_top1", "Tool calls", "share of tool-call tokens whose choice stays the same; higher is better", False, False, "{:.3f}"),
    Measure("fact_logp", "Facts", "-log p of facts asked later, nats; lower is better", True, True, "{:.2f}", sign=-1.0),
)
NEEDED = {"group", "family", "label", "trace", "tokens", "bits", "held", "scored", "kl", "top1", "call_tokens", "call_kl", "call_top1",
          "fact_logp", "facts_hit", "masked", "protocol", "source"}  # fmt: skip


def read_results(path: Path) -> dict[str, Any]:
    """A file that eval/peers_study.py, or `kvstrata eval --compare --json`, wrote. Raises ValueError for any other."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no JSON ({error}); accepted: results of kvstrata.eval.peers_study") from None
    runs = data.get("runs") if isinstance(data, dict) else None
    if not isinstance(runs, list) or not runs or not isinstance(data.get("model"), str):
        raise ValueError(f"{path} holds no runs of a model; accepted: results of kvstrata.eval.peers_study")
    for run in runs:
        missing = NEEDED - set(run) if isinstance(run, dict) else NEEDED
        if missing:
            raise ValueError(f"{path} has a run without {', '.join(sorted(missing))}; accepted: results of kvstrata.eval.peers_study")
    return data


def sections(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One for each model, source and protocol: title, charts, rows, verdicts."""
    out = []
    for data in results:
        for protocol, source in dict.fromkeys((r["protocol"], r["source"]) for r in data["runs"]):
            of = [r for r in data["runs"] if (r["protocol"], r["source"]) == (protocol, source)]
            rows, count = pools(of), len({r["trace"] for r in of})
            charts = [(m, chart) for m in MEASURES if (chart := _chart(rows, m)) is not None]
            out.append({
                "title": f"{data['model']}, {source}", "protocol": protocol, "count": count, "charts": charts, "rows": rows,
                "by_bits": verdicts(rows, "bits"), "by_held": verdicts(rows, "held"), "missing": not_run(data),
            })  # fmt: skip
    return out


def _chart(rows: Sequence[dict[str, Any]], m: Measure) -> ParetoChart | None:
    """None where nothing was measured."""
    points = [Point(r["family"], r["group"], r["label"], r["bits"], r["held"], m.sign * r[m.key]) for r in rows if r[m.key] is not None]
    points = [p for p in points if not m.log or p.value > 0]
    if not points:
        return None
    width, height = (1060, 470) if m.wide else (520, 330)
    return pareto_chart(points, log=m.log, low=m.low, digits=m.digits, width=width, height=height)


def write_compare_report(path: Path, results: Sequence[dict[str, Any]], watched: Watched | None) -> Path:
    """Write the page; the path comes back. Raises ValueError where there is nothing to show."""
    path.write_text(render_compare_report(results, watched), encoding="utf-8")
    return path


def render_compare_report(results: Sequence[dict[str, Any]], watched: Watched | None) -> str:
    if not results and watched is None:
        raise ValueError("the report needs results, a conversation, or both")
    environment = Environment(
        loader=PackageLoader("kvstrata.eval"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["figure"] = figure
    environment.filters["mib"] = lambda n: f"{n / 2**20:.2f}"
    shown: dict[str, Any] = {"watched": None}
    if watched is not None:
        spans = watched.conversation.spans
        shown = {
            "watched": watched, "map": rows_of(watched), "turns": turn_chart(watched), "letters": LETTERS, "row": ROW, "lane": LANE,
            "roles": {r: sum(s.end - s.start for s in spans if s.role is r) for r in Role if any(s.role is r for s in spans)},
            "tiers": [t for t in sorted(Tier, reverse=True) if t in watched.page_bits],
        }  # fmt: skip
    return environment.get_template("compare.html.j2").render(sections=sections(results), ours=OURS, outline=outline, **shown)
