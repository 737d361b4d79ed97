"""One conversation at several settings as a single HTML file: figures, bytes by turn, every token by tag and by tier.

The file needs no network: style, script, data and charts are inside. Knows nothing of how the results were made.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from kvstrata.eval.chart import line_chart, scatter_chart
from kvstrata.eval.conversation import Conversation
from kvstrata.eval.results import Result
from kvstrata.types import PAGE_SIZE, Age, Role, Span, Tier

AGE_NAMES = {Age.CURRENT: "current turn", Age.M1: "one turn ago", Age.M2: "two turns ago", Age.OLDER: "older"}


@dataclass(frozen=True)
class Row:
    """One setting in the report."""

    name: str
    result: Result
    page_bits: tuple[int, ...]
    page_bytes: dict[int, int]
    bytes_share: float


def write_report(path: Path, conversation: Conversation, results: Sequence[Result]) -> Path:
    """Write the report of the first conversation of each result; the path comes back."""
    path.write_text(render_report(conversation, results), encoding="utf-8")
    return path


def render_report(conversation: Conversation, results: Sequence[Result]) -> str:
    """The report's HTML. Raises ValueError where a result holds no conversation."""
    if not results or not all(r.outcomes for r in results):
        raise ValueError("the report needs the outcome of at least one setting")
    rows = []
    for result in results:
        outcome = result.outcomes[0]
        share = outcome.bytes_in_use / outcome.bytes_bf16
        rows.append(Row(result.label, result, outcome.page_tiers, outcome.page_bytes, share))
    tokens = rows[0].result.outcomes[0].tokens
    spans = conversation.spans_until(tokens)
    environment = Environment(
        loader=PackageLoader("kvstrata.eval"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["mib"] = lambda n: f"{n / 2**20:.2f}"
    environment.filters["figure"] = figure
    turn_starts = [(s.start, str(s.turn)) for before, s in pairwise(spans) if s.turn > before.turn]
    lines = [(r.name, [(0.0, 0.0)] + [(float(t.tokens), t.bytes_stored / 2**20) for t in r.result.outcomes[0].turns]) for r in rows]
    return environment.get_template("report.html.j2").render(
        conversation=conversation,
        model=results[0].model,
        protocol=results[0].protocol,
        rows=rows,
        tokens=tokens,
        turns=spans[-1].turn,
        blocks=[_block(conversation, s, spans[-1].turn) for s in spans],
        roles=[r for r in Role if any(s.role is r for s in spans)],
        role_tokens={r: sum(s.end - s.start for s in spans if s.role is r) for r in Role},
        tiers=[t for t in sorted(Tier, reverse=True) if any(t in r.page_bits for r in rows)],
        strips=[_strip(r) for r in rows],
        bytes_chart=line_chart(lines, turn_starts, "{:g}"),
        kl_chart=scatter_chart([(r.name, r.result.bits_per_element, r.result.kl_mean) for r in rows]),
        data=json.dumps(_data(conversation, spans, rows)).replace("<", "\\u003c"),
        page_size=PAGE_SIZE,
    )


def figure(value: float | None) -> str:
    """A loss in three digits; a dash where there is none."""
    if value is None or value != value:
        return "–"
    if abs(value) < 5e-7:
        return "0"
    return f"{value:.1e}" if abs(value) < 1e-3 else f"{value:.4f}"


def _block(conversation: Conversation, span: Span, current: int) -> dict[str, Any]:
    """A span of the text view: its role, age and token texts (a newline is shown and kept)."""
    texts = [conversation.token_text(p) for p in range(span.start, span.end)]
    return {
        "role": span.role,
        "age": AGE_NAMES[span.tag(current).age],
        "turn": span.turn,
        "tokens": [t.replace("\n", "↵\n") for t in texts],
    }


def _strip(row: Row) -> list[dict[str, Any]]:
    """Runs of pages of one tier: where they begin, how many, and the bits that give their height."""
    runs: list[dict[str, Any]] = []
    for page, bits in enumerate(row.page_bits):
        if runs and runs[-1]["bits"] == bits:
            runs[-1]["count"] += 1
        else:
            runs.append({"start": page, "count": 1, "bits": bits, "tier": Tier(bits).name})
    return runs


def _data(conversation: Conversation, spans: Sequence[Span], rows: Sequence[Row]) -> dict[str, Any]:
    """What the script needs for colours by tier and for the details under the pointer."""
    current = spans[-1].turn
    return {
        "page": PAGE_SIZE,
        "ids": conversation.token_ids[: spans[-1].end],
        "spans": [[s.start, s.end, s.role, s.modality, s.turn, AGE_NAMES[s.tag(current).age]] for s in spans],
        "tiers": {int(t): t.name for t in Tier},
        "settings": [{"name": r.name, "pages": r.page_bits, "bytes": {str(k): v for k, v in r.page_bytes.items()}} for r in rows],
    }
