"""Coordinates of a conversation's token map and of its bytes by turn. Knows nothing of HTML, or of how a session ran.

The map is cut into rows of ROW tokens, each with four lanes: what tokens are, their pages' tiers, anchors and survivors, attention.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstrata.eval.chart import Frame, Tick, nice_ticks
from kvstrata.eval.watched import Watched
from kvstrata.types import PAGE_SIZE, Role, Tier

ROW = 512
LETTERS = {Role.INST: "I", Role.USER: "U", Role.ASSISTANT: "A", Role.REASONING: "R", Role.TOOL_CALL: "C", Role.OBS: "O", Role.DELIM: ""}
"""What stands for a role where colours do not: in print, and for readers who tell few of them apart."""
LANE = 12
SEEN = 0.002
"""Share of attention at which a token's bar is as high as its lane."""


@dataclass(frozen=True)
class Run:
    """Tokens side by side that are alike. at: of the first in its row; text: what a pointer over it says."""

    at: int
    count: int
    kind: str
    height: float
    text: str
    letter: str = ""


@dataclass(frozen=True)
class MapRow:
    """start: its first token. held, attention: SVG paths over a lane of height LANE."""

    start: int
    count: int
    roles: tuple[Run, ...]
    tiers: tuple[Run, ...]
    held: str
    attention: str


def rows_of(w: Watched) -> list[MapRow]:
    return [_row(w, start, min(ROW, w.tokens - start)) for start in range(0, w.tokens, ROW)]


def _row(w: Watched, start: int, count: int) -> MapRow:
    end = start + count
    roles = []
    for s in w.conversation.spans:
        first, last = max(s.start, start), min(s.end, end)
        if first < last:
            # a letter needs a few tokens' room
            letter = LETTERS[s.role] if last - first >= 8 else ""
            name = s.role.replace("_", " ")
            roles.append(Run(first - start, last - first, s.role, LANE, f"{name}, turn {s.turn}, tokens {s.start} to {s.end - 1}", letter))
    tiers: list[Run] = []
    for page in range(start // PAGE_SIZE, -(-end // PAGE_SIZE)):
        bits = w.page_bits[page]
        n = min(PAGE_SIZE, end - page * PAGE_SIZE)
        if tiers and tiers[-1].kind == Tier(bits).name:
            before = tiers.pop()
            tiers.append(Run(before.at, before.count + n, before.kind, before.height, before.text))
        else:
            tiers.append(Run(page * PAGE_SIZE - start, n, Tier(bits).name, LANE * bits / 16, f"{Tier(bits).name} from page {page}"))
    kept = np.minimum(w.anchors + w.survivors, 1)[start:end]
    seen = np.minimum(w.attention[start:end] / SEEN, 1) ** 0.5
    return MapRow(start, count, tuple(roles), tuple(tiers), _area(kept), _area(seen))


def _area(heights: NDArray[np.float64]) -> str:
    """Bars of one token's width and `heights` of a lane, standing on y = LANE, as one path; those of no height are left out."""
    parts = []
    for i, h in enumerate(heights):
        if h * LANE >= 0.2:
            parts.append(f"M{i},{LANE}v{-h * LANE:.1f}h1V{LANE}z")
    return "".join(parts)


@dataclass(frozen=True)
class Part:
    role: str
    y: float
    height: float


@dataclass(frozen=True)
class TurnBar:
    """One step. reuse: share of its prompt that was stored already, and where that stands in the lower chart."""

    x: float
    width: float
    parts: tuple[Part, ...]
    bf16_y: float
    reuse: float
    reuse_y: float
    text: str


@dataclass(frozen=True)
class TurnChart(Frame):
    """Bytes above, hit rates below."""

    hits_top: int
    hits_bottom: int
    bars: tuple[TurnBar, ...]
    y_ticks: tuple[Tick, ...]
    x_ticks: tuple[Tick, ...]


def role_bytes(w: Watched, step: int) -> dict[str, float]:
    """Bytes stored after a step by what tokens are; what belongs to none of them, such as queries that are kept, as "rest"."""
    report = w.reports[step]
    out: dict[str, float] = {}
    for (_, _, role, tier), tokens in report.tokens_by_tag_and_tier.items():
        out[role] = out.get(role, 0.0) + tokens * w.page_bytes[int(Tier[tier])] / PAGE_SIZE
    total = sum(out.values())
    if total > report.bytes_stored:
        # a page that two roles share, or that is not full, is in `total` by its tokens
        out = {role: n * report.bytes_stored / total for role, n in out.items()}
    return {role: out[role] for role in (*Role, "rest") if role in out} | {"rest": max(0.0, report.bytes_stored - total)}


def turn_chart(w: Watched, width: int = 960, height: int = 360) -> TurnChart:
    left, right, top, bottom, hits_top, hits_bottom = 58, width - 12, 12, 214, 248, height - 34
    unit = 2**20
    ticks = nice_ticks(max(r.bytes_bf16 for r in w.reports) / unit)
    step = (right - left) / len(w.reports)

    def py(num_bytes: float) -> float:
        return bottom - (bottom - top) * num_bytes / unit / ticks[-1]

    bars = []
    for i, r in enumerate(w.reports):
        below, parts = 0.0, []
        for role, n in role_bytes(w, i).items():
            if n:
                parts.append(Part(role, py(below + n), py(below) - py(below + n)))
                below += n
        reuse = r.reused_tokens / max(r.reused_tokens + r.new_tokens, 1)
        text = f"step {i + 1}: {r.tokens:,} tokens, {r.bytes_stored / unit:.2f} MiB of {r.bytes_bf16 / unit:.2f}, {reuse:.0%} reused"
        reuse_y = hits_bottom - (hits_bottom - hits_top) * reuse
        bars.append(TurnBar(left + i * step + 0.12 * step, 0.76 * step, tuple(parts), py(r.bytes_bf16), reuse, reuse_y, text))
    every = max(1, -(-len(bars) // 16))
    x_ticks = tuple(Tick(b.x + b.width / 2, str(i + 1)) for i, b in enumerate(bars) if i % every == 0)
    y_ticks = tuple(Tick(py(t * unit), f"{t:g}") for t in ticks)
    return TurnChart(width, height, left, right, top, bottom, hits_top, hits_bottom, tuple(bars), y_ticks, x_ticks)
