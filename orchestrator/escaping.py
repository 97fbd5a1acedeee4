"""Text from a sandbox, a task or another host, made harmless for a display: what would steer one is spelled out.

What always holds: the result has no control character but tab and newline, nothing invisible, nothing that turns text
around, and it can be encoded. Escaping for HTML is a page's own business (dashboard/markup.py).
"""

from __future__ import annotations

import re

_STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but tab and newline, DEL, C1
    "\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff"  # invisible, and direction marks
    "\ud800-\udfff]"  # lone surrogates: they cannot be encoded
)


def escape_control(text: str) -> str:
    """`text` with everything that steers a display shown as its code, such as \\x1b."""
    return _STEERING.sub(_code, text)


def _code(match: re.Match[str]) -> str:
    code = ord(match.group())
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
