"""Coordinates of the report's charts: numbers in, points, ticks and labels out. Knows nothing of HTML or of what is plotted."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One line or one dot. label_y: where its label stands, moved so that labels do not overlap."""

    name: str
    index: int
    points: tuple[Point, ...]
    label_y: float = 0.0

    @property
    def path(self) -> str:
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in self.points)


@dataclass(frozen=True)
class Tick:
    at: float
    text: str


@dataclass(frozen=True)
class Frame:
    """A drawing's size, and where its axes lie."""

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int


@dataclass(frozen=True)
class Chart(Frame):
    series: tuple[Series, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]


def nice_ticks(top: float, count: int = 4) -> list[float]:
    """Round values from 0 to at least `top`, about `count` of them."""
    if top <= 0:
        return [0.0, 1.0]
    raw = top / count
    unit = 10 ** math.floor(math.log10(raw))
    step = next(m * unit for m in (1, 2, 2.5, 5, 10) if m * unit >= raw * 0.999)
    return [i * step for i in range(math.ceil(top / step - 1e-9) + 1)]


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions near the wanted ones, at least `gap` apart where the room allows, in [low, high]."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    placed: list[float] = []
    for i in order:
        placed.append(max(wanted[i], placed[-1] + gap) if placed else max(wanted[i], low))
    over = max(placed[-1] - high, 0) if placed else 0
    for k in range(len(placed) - 1, -1, -1):
        ceiling = high if k == len(placed) - 1 else placed[k + 1] - gap
        placed[k] = min(placed[k], ceiling) if over else placed[k]
    out = [0.0] * len(wanted)
    for k, i in enumerate(order):
        out[i] = placed[k]
    return out


def line_chart(
    lines: Sequence[tuple[str, Sequence[Point]]],
    x_marks: Sequence[tuple[float, str]],
    y_format: str,
    width: int = 640,
    height: int = 330,
) -> Chart:
    """Lines over a linear x and y from 0; labels at the right ends."""
    left, right, top, bottom = 56, width - 118, 14, height - 34
    x_max = max((x for _, points in lines for x, _ in points), default=1.0) or 1.0
    y_values = nice_ticks(max((y for _, points in lines for _, y in points), default=1.0))

    def px(x: float) -> float:
        return left + (right - left) * x / x_max

    def py(y: float) -> float:
        return bottom - (bottom - top) * y / y_values[-1]

    ends = spread([py(points[-1][1]) for _, points in lines], 15, top + 4, bottom - 2)
    series = [Series(n, i, tuple((px(x), py(y)) for x, y in points), ends[i]) for i, (n, points) in enumerate(lines)]
    x_ticks = tuple(Tick(px(x), text) for x, text in x_marks)
    return Chart(width, height, left, right, top, bottom, tuple(series), x_ticks, tuple(Tick(py(y), y_format.format(y)) for y in y_values))


def scatter_chart(dots: Sequence[tuple[str, float, float]], width: int = 460, height: int = 330) -> Chart:
    """Dots (name, x, y) over a linear x from 0 and a logarithmic y; labels beside them. Dots without a positive finite y are left out."""
    left, right, top, bottom = 56, width - 20, 14, height - 34
    shown = [(i, n, x, y) for i, (n, x, y) in enumerate(dots) if y > 0 and math.isfinite(y)]
    low = math.floor(math.log10(min((y for *_, y in shown), default=1e-3)))
    high = max(math.ceil(math.log10(max((y for *_, y in shown), default=1.0))), low + 1)
    x_values = nice_ticks(max((x for _, _, x, _ in shown), default=1.0))

    def px(x: float) -> float:
        return left + (right - left) * x / x_values[-1]

    def py(y: float) -> float:
        return bottom - (bottom - top) * (math.log10(y) - low) / (high - low)

    labels = spread([py(y) for *_, y in shown], 15, top + 4, bottom - 2)
    series = [Series(n, i, ((px(x), py(y)),), labels[k]) for k, (i, n, x, y) in enumerate(shown)]
    y_ticks = tuple(Tick(py(10.0**e), f"{10.0**e:g}" if e > -4 else f"1e{e}") for e in range(low, high + 1))
    return Chart(width, height, left, right, top, bottom, tuple(series), tuple(Tick(px(x), f"{x:g}") for x in x_values), y_ticks)
