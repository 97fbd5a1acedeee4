"""Keeps gradio out of this process; imported by the package before anything of `openenv.core` can be.

openenv.core always imports its web UI, and with it gradio: 3.0 s and 187 MB a process instead of 0.8 s and 65 MB. A
worker host runs many processes and no web UI. With None in sys.modules the import fails, which openenv.core allows for.
"""

from __future__ import annotations

import sys

sys.modules.setdefault("gradio", None)  # type: ignore[arg-type]
