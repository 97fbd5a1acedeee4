"""Small charts as SVG, drawn from numbers alone; colours come from the style sheet by class, for light and dark."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from orchestrator.dashboard.markup import Markup, element, joined

WIDTH, HEIGHT = 460.0, 150.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 48.0, 6.0, 8.0, 20.0
_GRID = 4

Label = Callable[[float], str]


def stacked(layers: Sequence[tuple[str, Sequence[float]]], *, window: str, label: Label) -> Markup:
    """Bars, one a bucket, of layers (class, values) on each other, the first at the bottom."""
    totals = [sum(column) for column in zip(*(values for _, values in layers), strict=True)]
    top = nice(max(totals, default=0))
    width = (WIDTH - _LEFT - _RIGHT) / len(totals)
    bars: list[Markup] = []
    for place in range(len(totals)):
        below = 0.0
        for css, values in layers:
            if values[place] <= 0:
                continue
            high, low = _y(below + values[place], top), _y(below, top)
            bars.append(
                element(
                    "rect",
                    class_=css,
                    x=_n(_LEFT + place * width + 0.5),
                    y=_n(high),
                    width=_n(max(1.0, width - 1.5)),
                    height=_n(max(0.5, low - high)),
                )
            )
            below += values[place]
    return _svg(top, window, label, bars)


def area(values: Sequence[float], *, css: str, limit: float, limit_text: str, window: str, label: Label) -> Markup:
    """A filled line, and a dashed one at the limit where it is within eight times of what was reached."""
    most = max(values, default=0)
    near = limit <= 8 * max(most, 1)
    top = nice(max(most, limit if near else 0))
    points = [(_x(place, len(values)), _y(value, top)) for place, value in enumerate(values)]
    line = " L".join(f"{_n(x)} {_n(y)}" for x, y in points)
    base = _y(0, top)
    drawn = [
        element(
            "path", class_=f"{css} fill", d=f"M{_n(points[0][0])} {_n(base)} L{line} L{_n(points[-1][0])} {_n(base)} Z"
        ),
        element("path", class_=f"{css} stroke", d=f"M{line}"),
    ]
    if near:
        y = _n(_y(limit, top))
        drawn.append(element("line", class_="limit", x1=_n(_LEFT), x2=_n(WIDTH - _RIGHT), y1=y, y2=y))
        above = _y(limit, top) - 3 if _y(limit, top) > 18 else _y(limit, top) + 11
        drawn.append(element("text", limit_text, class_="limit-text", x=_n(WIDTH - _RIGHT - 2), y=_n(above)))
    return _svg(top, window, label, drawn)


def line(values: Sequence[float | None], *, css: str, top: float, window: str, label: Label) -> Markup:
    """A line over the buckets that have a value, with a dot at each."""
    points = [(_x(place, len(values)), _y(value, top)) for place, value in enumerate(values) if value is not None]
    drawn = []
    if len(points) > 1:
        drawn.append(element("path", class_=f"{css} stroke", d="M" + " L".join(f"{_n(x)} {_n(y)}" for x, y in points)))
    drawn += [element("circle", class_=css, cx=_n(x), cy=_n(y), r="2.6") for x, y in points]
    return _svg(top, window, label, drawn)


def nice(value: float) -> float:
    """A round number of at least `value` for an axis; 1 when there is nothing."""
    if value <= 0:
        return 1.0
    size = 10.0 ** math.floor(math.log10(value))
    return next(step * size for step in (1, 1.2, 1.6, 2, 3, 4, 5, 6, 8, 10) if step * size >= value * 0.9999)


def _svg(top: float, window: str, label: Label, drawn: Sequence[Markup]) -> Markup:
    grid = []
    for step in range(_GRID + 1):
        value = top * step / _GRID
        y = _y(value, top)
        grid.append(element("line", class_="grid", x1=_n(_LEFT), x2=_n(WIDTH - _RIGHT), y1=_n(y), y2=_n(y)))
        if step % 2 == 0:
            grid.append(element("text", label(value), class_="tick", x=_n(_LEFT - 6), y=_n(y + 3.5)))
    ends = [
        element("text", f"{window} ago", class_="tick begin", x=_n(_LEFT), y=_n(HEIGHT - 5)),
        element("text", "now", class_="tick", x=_n(WIDTH - _RIGHT), y=_n(HEIGHT - 5)),
    ]
    return element(
        "svg", joined((*grid, *drawn, *ends)), viewBox=f"0 0 {_n(WIDTH)} {_n(HEIGHT)}", role="img", class_="chart"
    )


def _x(place: int, count: int) -> float:
    return _LEFT + (place + 0.5) * (WIDTH - _LEFT - _RIGHT) / count


def _y(value: float, top: float) -> float:
    return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * min(1.0, max(0.0, value / top))


def _n(value: float) -> str:
    return f"{value:.1f}"
