"""Where the page and its JSON are: `/` leads to `/dashboard/`; `/api/episodes/<id>` and `/api/runs/<id>` for programs.

What always holds: what is not known is 404 with a reason, a Redis that is away is 503, and neither shows a trace.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import RedirectResponse, Response
from redis.exceptions import RedisError
from starlette.types import ASGIApp

from orchestrator.dashboard.gate import Gate, answered, refusal
from orchestrator.dashboard.lookout import EpisodeView, Lookout
from orchestrator.deadline import Deadline
from orchestrator.farm import Farm
from orchestrator.receipts import ReceiptFilter, Receipts
from orchestrator.records import is_id
from orchestrator.redis_address import without_password
from orchestrator.runs import count_open

logger = logging.getLogger(__name__)

PATH = "/dashboard"

_ANSWER_SECONDS = 10.0
"""A run of 100 receipts is a dozen round trips."""

_NEWEST = 100
"""Receipts that a run's answer lists; `rollout-farm receipts --run` lists all."""


def add_dashboard(app: FastAPI, farm: Farm, make_page: Callable[[Lookout, str], ASGIApp], *, token: str | None) -> None:
    """Add page and JSON to the application. `make_page` is page.make_page, imported when somebody looks."""
    lookout = Lookout(farm)
    deadline = Deadline(seconds=_ANSWER_SECONDS, places=8)

    def guarded(request: Request, answer: Callable[[], Response]) -> Response:
        refused = refusal(request.headers, token)
        if refused is not None:
            return refused
        try:
            return deadline.within(answer)
        except (RedisError, OSError) as error:
            logger.warning("not read: %s", without_password(str(error)))
            return answered({"error": "the farm's Redis does not answer; ask again when it is back"}, 503)

    @app.get("/")
    def home(request: Request) -> Response:
        query = f"?{request.url.query}" if request.url.query else ""
        return RedirectResponse(f"{PATH.removeprefix('/')}/{query}")

    @app.get("/favicon.ico")
    def icon() -> Response:
        return Response(status_code=204)  # browsers ask for it unasked; there is none

    @app.get("/api/episodes/{episode_id}")
    def episode(request: Request, episode_id: str) -> Response:
        def answer() -> Response:
            view = lookout.find(episode_id)
            if view.known:
                return answered(episode_json(view))
            return answered({"error": f"no episode {episode_id!r}: unknown here, or its receipt has expired"}, 404)

        return guarded(request, answer)

    @app.get("/api/runs/{run_id}")
    def run(request: Request, run_id: str) -> Response:
        def answer() -> Response:
            found = run_json(farm, run_id)
            if found is not None:
                return answered(found)
            return answered({"error": f"no run {run_id!r}: unknown here, or its receipts have expired"}, 404)

        return guarded(request, answer)

    app.mount(PATH, Gate(lambda: make_page(lookout, PATH), token=token))


def episode_json(view: EpisodeView) -> dict[str, Any]:
    """An episode whole: state, receipt, sandboxes, transcript. Times are unix seconds."""
    row = view.row
    return {
        "episode_id": view.episode_id,
        "state": "final" if view.settled is not None else str(row.state) if row is not None else None,
        "run_id": row.run_id if row is not None else view.settled.receipt.run_id if view.settled is not None else None,
        "problem": view.trouble or None,
        "receipt": None if view.settled is None else view.settled.as_json(),
        "sandboxes": [one.model_dump(mode="json") for one in view.allocations],
        "transcript": list(view.transcript),
    }


def run_json(farm: Farm, run_id: str) -> dict[str, Any] | None:
    """A run: how many of its episodes are where, its budget, its newest receipts; None when it is not known."""
    if not is_id(run_id):
        return None
    receipts = Receipts(farm.redis, farm.ledger.allocations)
    counts = count_open(farm.redis, run_id)
    if not counts and not receipts.knows_run(run_id):
        return None
    newest = list(receipts.select(ReceiptFilter(run_id=run_id), limit=_NEWEST))
    return {
        "run_id": run_id,
        "open": {str(state): counts[state] for state in sorted(counts)},
        "ended": receipts.count_of_run(run_id),
        "budget": farm.budget.read(run_id).as_json(),
        "newest_receipts": [settled.as_json() for settled in newest],
    }
