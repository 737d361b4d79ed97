"""One HTML page of the comparison: Pareto fronts of ours and every peer, and what became of one conversation's tokens.

Needs no network and no script. Knows nothing of how the results were made.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from kvstrata.eval.pareto import ParetoChart, Point, outline, pareto_chart
from kvstrata.eval.peers.compare import not_run, pools, verdicts
from kvstrata.eval.peers.rows import GROUPS, OURS
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


def _is_number(x: Any) -> bool:
    """Not a number and infinity are measures too; whole numbers beyond every float are not."""
    return isinstance(x, float) or (_is_whole(x) and abs(x) < _LARGEST)


def _is_whole(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


_LARGEST = 10**15
NEEDED: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (("family", "label", "trace", "protocol", "source"), lambda x: isinstance(x, str), "text"),
    (("group",), lambda x: x in GROUPS, ", ".join(GROUPS)),
    (("tokens", "scored"), lambda x: _is_whole(x) and 0 < x < _LARGEST, "a whole number above 0"),
    (("call_tokens", "facts_hit"), lambda x: _is_whole(x) and 0 <= x < _LARGEST, "a whole number, 0 or more"),
    (("bits", "held"), lambda x: _is_number(x) and 0 < x < _LARGEST, "a number above 0"),
    (("kl", "top1", "masked"), _is_number, "a number"),
    (("call_kl", "call_top1"), lambda x: x is None or _is_number(x), "a number, or null"),
    (("fact_logp",), lambda x: isinstance(x, list) and all(map(_is_number, x)), "a list of numbers"),
)
"""Of a run: names, what their values are, and that in words."""


def read_results(path: Path) -> dict[str, Any]:
    """A file that eval/peers_study.py, or `kvstrata eval --compare --json`, wrote. Raises ValueError for any other."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON ({error}); accepted: results of kvstrata.eval.peers_study") from None
    runs = data.get("runs") if isinstance(data, dict) else None
    if not isinstance(runs, list) or not runs or not isinstance(data.get("model"), str):
        raise ValueError(f"{path} holds no runs of a model; accepted: results of kvstrata.eval.peers_study")
    missing = data.get("missing", {})
    if not isinstance(missing, dict) or not all(isinstance(why, str) for why in missing.values()):
        raise ValueError(f"{path}: missing is {str(missing)[:40]!r}; accepted: what kept a family from running, by its name")
    for run in runs:
        _check_run(path, run)
    return data


def _check_run(path: Path, run: Any) -> None:
    """Raise ValueError, naming the file, what is wrong and what is accepted."""
    lacking = {name for names, _, _ in NEEDED for name in names} - set(run if isinstance(run, dict) else ())
    if lacking:
        raise ValueError(f"{path} has a run without {', '.join(sorted(lacking))}; accepted: results of kvstrata.eval.peers_study")
    for names, fits, accepted in NEEDED:
        for name in names:
            if not fits(run[name]):
                raise ValueError(f"{path}: {name} of run {str(run['label'])[:40]!r} is {str(run[name])[:40]!r}; accepted: {accepted}")


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
