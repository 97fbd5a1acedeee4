"""What one page shows: its panes, each with a digest, so that a pane that has not changed is not sent again.

What always holds: the address alone says what is shown, so a link says the same to everybody and a restart loses
nothing; one drawing serves every page that asks for the same look.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from urllib.parse import parse_qs

from orchestrator.dashboard.episode import episode_page
from orchestrator.dashboard.lookout import EpisodeView, Lookout, View
from orchestrator.dashboard.markup import NOTHING, Markup, element
from orchestrator.dashboard.overview import alarms, episodes, header, tiles, workers
from orchestrator.dashboard.trends import trends
from orchestrator.records import is_id

PANES = ("header", "alarms", "tiles", "trends", "episodes", "workers", "episode")
"""In the order of the page."""

_ASKED_CHARACTERS = 4_000


@dataclass(frozen=True)
class Asked:
    """What a browser wants to see, and what it shows already."""

    episode: str | None = None
    window: str | None = None
    digests: Mapping[str, str] = field(default_factory=dict)


def asked(text: str) -> Asked:
    """Read the page's question: JSON with its query string and its digests. Anything else asks for the overview."""
    try:
        told = json.loads(text[:_ASKED_CHARACTERS])
        query = parse_qs(str(told["search"]).removeprefix("?"))
        digests = {str(name): str(digest) for name, digest in dict(told["digests"]).items()}
    except (ValueError, TypeError, KeyError, RecursionError):
        return Asked()
    return Asked(_last(query, "episode"), _last(query, "window"), digests)


def changed(lookout: Lookout, question: Asked) -> dict[str, Markup | None]:
    """Every pane by name; None for one that the browser shows already."""
    shown = _overview(lookout.view(), question.window) if question.episode is None else _one(lookout, question.episode)
    return {name: None if question.digests.get(name) == digest else pane for name, (pane, digest) in shown.items()}


def _one(lookout: Lookout, episode_id: str) -> dict[str, tuple[Markup, str]]:
    found = lookout.episode(episode_id) if is_id(episode_id) else EpisodeView(episode_id, 0.0)
    top = _sealed({"header": header(lookout.view())})
    return {**_EMPTY, **top, **_episode(found)}


@lru_cache(maxsize=8)
def _overview(view: View, window: str | None) -> dict[str, tuple[Markup, str]]:
    look = view.look
    panes = {"header": header(view)}
    if look is not None:
        panes |= {
            "alarms": alarms(look),
            "tiles": tiles(look),
            "trends": trends(look, window),
            "episodes": episodes(look),
            "workers": workers(look),
        }
    return {**_EMPTY, **_sealed(panes)}


@lru_cache(maxsize=16)
def _episode(view: EpisodeView) -> dict[str, tuple[Markup, str]]:
    return _sealed({"episode": episode_page(view)})


def _sealed(panes: Mapping[str, Markup]) -> dict[str, tuple[Markup, str]]:
    """Each with its digest, which it carries so that the browser can tell it."""
    sealed = {}
    for name, pane in panes.items():
        digest = hashlib.sha256(pane.encode()).hexdigest()[:16]
        sealed[name] = (element("div", pane, class_=f"farm {name}", data_pane=name, data_digest=digest), digest)
    return sealed


_EMPTY = _sealed(dict.fromkeys(PANES, NOTHING))


def _last(query: Mapping[str, list[str]], name: str) -> str | None:
    return query[name][-1] if query.get(name) else None
