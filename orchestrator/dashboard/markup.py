"""HTML as a type: the one place where text becomes HTML, and where it is cut and escaped.

What always holds: an `element` escapes every child and attribute that is not Markup already, so forgetting to escape is
not possible; Markup is made here and by joining Markup only. What would steer a display (ANSI, NUL, direction marks) is
spelled out as in a terminal.
"""

from __future__ import annotations

import html
from collections.abc import Iterable

from orchestrator.escaping import escape_control

_VOID = frozenset({"br", "path", "rect", "line", "circle", "polyline"})
_LINE_CHARACTERS = 400
"""What a table's cell or a title shows of a text: ids have 64 at most, a reason can have a thousand."""


class Markup(str):
    """HTML that needs no escaping any more."""

    __slots__ = ()


Child = Markup | str | int | None

NOTHING = Markup("")


def text(value: str, *, limit: int = _LINE_CHARACTERS) -> Markup:
    """`value` as HTML: cut in its middle to `limit` characters, spelled out, escaped."""
    return Markup(html.escape(escape_control(cut(value, limit)), quote=True))


def cut(value: str, limit: int) -> str:
    """`value`, or its first three quarters and its end with a notice of what is missing between."""
    if len(value) <= limit:
        return value
    head, tail = limit * 3 // 4, limit // 4
    return f"{value[:head]} [... {len(value) - head - tail:,} characters not shown ...] {value[len(value) - tail :]}"


def element(name: str, *children: Child, **attributes: str | float | None) -> Markup:
    """One element. `class_` is class, `data_x` is data-x; an attribute that is None is left out."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(str(value), limit=20_000)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Markup(f"<{name}{given}/>")
    return Markup(f"<{name}{given}>{joined(children)}</{name}>")


def joined(children: Iterable[Child]) -> Markup:
    """Several as one; None is nothing."""
    return Markup("".join(_html(child) for child in children if child is not None))


def _html(child: Markup | str | int) -> str:
    return child if isinstance(child, Markup) else text(str(child))
