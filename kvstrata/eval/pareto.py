"""Coordinates of loss against bits for many families: marks told apart by shape and colour, a line a family, the front of all.

Knows nothing of HTML or of what is plotted.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvstrata.eval.chart import Frame, Tick, nice_ticks

SHAPES = ("circle", "square", "diamond", "up", "down", "cross", "plus", "star", "bar", "hexagon", "left", "right")
BIT_TICKS = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
LEFT, TOP, BELOW, RIGHT = 58, 12, 46, 16


@dataclass(frozen=True)
class Point:
    """What is plotted: bits held in codes and what stays dense, all that is held, and a measure."""

    family: str
    group: str
    label: str
    bits: float
    held: float
    value: float


@dataclass(frozen=True)
class Mark:
    """A point in the chart. held_x: where its whisker ends, at what is held in all."""

    x: float
    y: float
    held_x: float
    path: str
    text: str


@dataclass(frozen=True)
class Family:
    name: str
    group: str
    shape: str
    line: str
    marks: tuple[Mark, ...]


@dataclass(frozen=True)
class ParetoChart(Frame):
    families: tuple[Family, ...]
    front: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]


def shapes_of(points: Sequence[Point]) -> dict[str, str]:
    """A shape for each family, no two alike within a group (of up to a dozen)."""
    shapes: dict[str, str] = {}
    seen: dict[str, int] = {}
    for p in points:
        if p.family not in shapes:
            shapes[p.family] = SHAPES[seen.get(p.group, 0) % len(SHAPES)]
            seen[p.group] = seen.get(p.group, 0) + 1
    return shapes


def outline(shape: str, x: float, y: float, r: float = 5.0) -> str:
    """An SVG path of a mark around (x, y)."""
    if shape == "circle":
        return f"M{x - r:.1f},{y:.1f}a{r},{r} 0 1 0 {2 * r},0a{r},{r} 0 1 0 {-2 * r},0z"
    if shape in ("plus", "cross"):
        arm, thin = r * 1.15, r * 0.36
        corners = [(-thin, -arm), (thin, -arm), (thin, -thin), (arm, -thin), (arm, thin), (thin, thin), (thin, arm), (-thin, arm),
                   (-thin, thin), (-arm, thin), (-arm, -thin), (-thin, -thin)]  # fmt: skip
        if shape == "cross":
            corners = [((a - b) * math.sqrt(0.5), (a + b) * math.sqrt(0.5)) for a, b in corners]
    elif shape == "star":
        corners = [(math.sin(i * math.pi / 5) * s, -math.cos(i * math.pi / 5) * s) for i, s in enumerate([1.3 * r, 0.55 * r] * 5)]
    elif shape == "bar":
        corners = [(-1.2 * r, -0.45 * r), (1.2 * r, -0.45 * r), (1.2 * r, 0.45 * r), (-1.2 * r, 0.45 * r)]
    else:
        sides, turn = {"square": (4, 0.125), "diamond": (4, 0.0), "hexagon": (6, 0.0), "up": (3, 0.0), "right": (3, 0.25), "down": (3, 0.5),
                       "left": (3, 0.75)}[shape]  # fmt: skip
        angles = [2 * math.pi * (i / sides + turn) for i in range(sides)]
        corners = [(math.sin(a) * 1.25 * r, -math.cos(a) * 1.25 * r) for a in angles]
    return "M" + "L".join(f"{x + a:.1f},{y + b:.1f}" for a, b in corners) + "z"


def front(points: Sequence[Point], low: bool) -> list[Point]:
    """Points that no other beats in bits and measure both, by rising bits. low: less is better."""
    best: list[Point] = []
    for p in sorted(points, key=lambda p: (p.bits, p.value if low else -p.value)):
        if not best or (p.value < best[-1].value if low else p.value > best[-1].value):
            best.append(p)
    return best


def pareto_chart(
    points: Sequence[Point], *, log: bool, low: bool, digits: str = "{:g}", width: int = 640, height: int = 400
) -> ParetoChart:
    """Points over bits, which are on a logarithmic scale. log: so is the measure, and points without a positive one are left out.
    low: less of it is better. Raises ValueError without points."""
    shown = [p for p in points if math.isfinite(p.value) and p.bits > 0 and (p.value > 0 or not log)]
    if not shown:
        raise ValueError("no point has a measure that can be shown")
    right, bottom = width - RIGHT, height - BELOW
    x_low, x_high = min(p.bits for p in shown) / 1.08, max(p.held for p in shown) * 1.08

    def px(bits: float) -> float:
        return LEFT + (right - LEFT) * math.log(bits / x_low) / math.log(x_high / x_low)

    values = [p.value for p in shown]
    if log:
        y_low, y_high = math.log10(min(values)) - 0.08, math.log10(max(values)) + 0.08
        powers = range(math.floor(y_low), math.ceil(y_high) + 1)
        ticks = [(m * 10.0**e, f"{m * 10.0**e:.0e}" if e < -4 else f"{m * 10.0**e:g}") for e in powers for m in (1, 3)]
        ticks = [(v, text) for v, text in ticks if y_low <= math.log10(v) <= y_high]
    else:
        span = max(max(values) - min(values), 1e-9)
        y_low, y_high = min(values) - 0.05 * span, max(values) + 0.05 * span
        step = nice_ticks(y_high - y_low)[1]
        ticks = [(i * step, digits.format(i * step)) for i in range(math.ceil(y_low / step), math.floor(y_high / step) + 1)]

    def py(value: float) -> float:
        v = math.log10(value) if log else value
        return bottom - (bottom - TOP) * (v - y_low) / (y_high - y_low)

    shapes = shapes_of(points)
    families = []
    for name in dict.fromkeys(p.family for p in shown):
        of = sorted((p for p in shown if p.family == name), key=lambda p: p.bits)
        marks = tuple(
            Mark(px(p.bits), py(p.value), px(p.held), outline(shapes[name], px(p.bits), py(p.value)), f"{p.label}: {p.bits:.2f} bits, "
                 + (f"{p.held:.2f} held, " if p.held > p.bits + 0.005 else "") + (f"{p.value:.2g}" if log else digits.format(p.value)))
            for p in of
        )  # fmt: skip
        families.append(Family(name, of[0].group, shapes[name], " ".join(f"{m.x:.1f},{m.y:.1f}" for m in marks), marks))
    steps: list[str] = []
    for i, p in enumerate(best := front(shown, low)):
        steps += [f"{px(p.bits):.1f},{py(best[i - 1].value):.1f}"] if i else []
        steps.append(f"{px(p.bits):.1f},{py(p.value):.1f}")
    steps.append(f"{right},{py(best[-1].value):.1f}")
    x_ticks = tuple(Tick(px(b), f"{b:g}") for b in BIT_TICKS if x_low <= b <= x_high)
    return ParetoChart(
        width, height, LEFT, right, TOP, bottom, tuple(families), " ".join(steps), x_ticks, tuple(Tick(py(v), text) for v, text in ticks)
    )
