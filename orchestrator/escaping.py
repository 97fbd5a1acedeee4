"""Text from a sandbox, a task or another host, made harmless for a display: what would steer one is spelled out.

What always holds: the result has no control character but tab and newline, nothing invisible but spaces, nothing that
turns text around, and it can be encoded. So emoji that are joined or tinted by something invisible come apart, too.
Escaping for HTML is a page's own business (dashboard/markup.py).
"""

from __future__ import annotations

import re
import unicodedata
from functools import cache
from itertools import chain, groupby

_STEERING = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode's categories: control, format (invisible, and direction marks), lone surrogates, line and paragraph ends."""
_PLANES = (range(0x20000), range(0xE0000, 0xE1000))
"""Where code points of these categories are; between are ideographs and nothing, behind what applications define."""
_INVISIBLE = (
    *(0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, *range(0x180B, 0x1810), 0x2065, 0x3164, *range(0xFE00, 0xFE10), 0xFFA0),
    *(*range(0xFFF0, 0xFFF9), *range(0xE0000, 0xE1000)),
)
"""Of other categories: letters and marks that are drawn as nothing (Unicode's Default_Ignorable_Code_Point)."""
_LAYOUT = frozenset(map(ord, "\t\n"))


def escape_control(text: str) -> str:
    """`text` with everything that steers a display shown as its code, such as \\x1b."""
    return _harmful().sub(_code, text)


@cache
def _harmful() -> re.Pattern[str]:
    """One class of all of them: in whatever language a text is, only what is spelled out costs more than a look."""
    steering = {code for code in chain(*_PLANES) if unicodedata.category(chr(code)) in _STEERING}
    wanted = sorted(steering.union(_INVISIBLE) - _LAYOUT)
    # as ranges: each code point by itself would be compared with every character
    runs = groupby(enumerate(wanted), lambda pair: pair[1] - pair[0])
    ends = ((codes[0], codes[-1]) for codes in ([code for _, code in run] for _, run in runs))
    return re.compile("[" + "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in ends) + "]")


def _code(match: re.Match[str]) -> str:
    code = ord(match.group())
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
