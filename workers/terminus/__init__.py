"""The Terminus environment: an OpenEnv server whose sessions are sandboxes, and the slot's client of it."""

from workers.terminus import without_gradio as _without_gradio

__all__: list[str] = []

del _without_gradio
