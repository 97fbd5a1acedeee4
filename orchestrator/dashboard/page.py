"""The page in Gradio: a timer asks once a second and gets the panes that have changed. The only importer of it.

What always holds: nothing is asked of another host (system fonts, no analytics, no version check); every answer is a
short POST, nothing is queued or streamed, so an open page holds no connection and delays no shutdown; an answer that
fails never shows an error's text.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import gradio
from fastapi import FastAPI
from starlette.types import ASGIApp

from orchestrator.dashboard.lookout import Lookout
from orchestrator.dashboard.panes import PANES, asked, changed

logger = logging.getLogger(__name__)

REFRESH_SECONDS = 1.0

_HERE = Path(__file__).parent
_SYSTEM_FONTS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif")
_SYSTEM_MONO = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace")


def make_page(lookout: Lookout, path: str) -> ASGIApp:
    """The page as an application that is mounted at `path`."""

    def answer(text: str) -> list[Any]:
        panes = changed(lookout, asked(text))
        return [gradio.skip() if panes[name] is None else panes[name] for name in PANES]

    with gradio.Blocks(analytics_enabled=False, title="rollout farm", fill_width=True) as blocks:
        question = gradio.Textbox(visible="hidden")
        shown = [gradio.HTML("", elem_id=f"pane-{name}", js_on_load=None, apply_default_css=False) for name in PANES]
        timer = gradio.Timer(REFRESH_SECONDS)
        gradio.on(
            [blocks.load, timer.tick],
            answer,
            inputs=[question],
            outputs=shown,
            js=(_HERE / "ask.js").read_text(),
            queue=False,
            show_progress="hidden",
            api_visibility="private",
        )
    style, watch = (_HERE / "page.css").read_text(), (_HERE / "watch.js").read_text()
    mounted = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    gradio.mount_gradio_app(
        mounted,
        blocks,
        "",
        theme=gradio.themes.Base(font=_SYSTEM_FONTS, font_mono=_SYSTEM_MONO),
        head=f"<style>{style}</style><script>{watch}</script>",
        footer_links=[],
        run_history=False,
        show_error=False,
        pwa=False,
        mcp_server=False,
        ssr_mode=False,
        enable_monitoring=False,
        app_kwargs={"docs_url": None, "redoc_url": None, "openapi_url": None},
    )
    return mounted
