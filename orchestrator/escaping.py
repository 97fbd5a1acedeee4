"""Text from a sandbox, a task or another host, made harmless for a display: what would steer one is spelled out.

What always holds: the result has no control character but tab and newline, nothing invisible but spaces, nothing that
turns text around, and it can be encoded. So emoji that are joined or tinted by something invisible come apart, too.
Escaping for HTML is a page's own business (dashboard/markup.py).
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

_PERHAPS = re.compile("[^\t\n\x20-\x7e]")
_STEERING = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode's categories: control, format (invisible, and direction marks), lone surrogates, line and paragraph ends."""
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2065\u3164\ufe00-\ufe0f\uffa0\ufff0-\ufff8\U000e0000-\U000e0fff]"
)
"""Of other categories: letters and marks that are drawn as nothing (Unicode's Default_Ignorable_Code_Point)."""


def escape_control(text: str) -> str:
    """`text` with everything that steers a display shown as its code, such as \\x1b."""
    return _PERHAPS.sub(lambda match: _shown(match.group()), text)


@lru_cache(maxsize=4096)
def _shown(character: str) -> str:
    if unicodedata.category(character) not in _STEERING and not _INVISIBLE.match(character):
        return character
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
