"""The one seam where faults meet requests: `Injector.apply` wraps the service, and passes all through when none is set.

What always holds: a call is either not carried out at all, or carried out exactly as without faults; only its time and
its answer are disturbed. So an idempotency key keeps its meaning whatever becomes of the answer.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from workers.e2b_local.asgi import App, Message, Receive, Scope, Send, connection_of, headers_of, read_body, respond
from workers.e2b_local.events import EventLog
from workers.e2b_local.faults import Faults, Operation
from workers.e2b_local.sandboxes import Registry, Sandbox
from workers.e2b_local.verdicts import Call, Ending, Plan, Refusal

logger = logging.getLogger(__name__)

_BODY_BYTES = 4_194_304
_HUNG_SECONDS = 600.0
_HTML = b"<html><head><title>429 Too Many Requests</title></head><body><center>slow down</center></body></html>\n"
_START = "/process.Process/Start"

Addressee = Callable[[Scope], str | None]


class Injector:
    """The faults that are set now; `outage`, where the server has given one, stops listening for some seconds."""

    def __init__(self, registry: Registry, log: EventLog, addressee: Addressee) -> None:
        self.outage: Callable[[float], None] | None = None
        self._registry = registry
        self._log = log
        self._addressee = addressee
        self._plan: Plan | None = None
        registry.on_started = self._shorten

    def set(self, faults: Faults) -> None:
        """Let these faults take the place of all that were set; raises ValueError for an outage that cannot be."""
        if faults.outage_seconds:
            if self.outage is None:
                raise ValueError("outage_seconds: this server cannot stop listening")
            self.outage(faults.outage_seconds)
        self._plan = Plan(faults) if faults != Faults() else None

    def shown(self) -> dict[str, Any]:
        """What is set, and how often each fault has struck since."""
        plan = self._plan
        return {"faults": plan.faults.shown() if plan else {}, "hits": dict(plan.hits) if plan else {}}

    def over_cap(self, own_cap: int) -> int | None:
        """The cap on sandboxes when one more would pass it, otherwise None."""
        faults = self._plan.faults if self._plan else None
        cap = faults.max_sandboxes or own_cap if faults else own_cap
        count = len(self._registry)
        if faults and faults.count_lag_seconds:
            count += self._log.ended_since(time.time() - faults.count_lag_seconds)
        if count < cap:
            return None
        if self._plan:
            self._plan.hits["max_sandboxes"] += 1
        return cap

    async def apply(self, app: App, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request through `app`, as the faults want it."""
        plan = self._plan
        sandbox_id = self._addressee(scope) if plan else None
        operation = _operation(scope, inside=sandbox_id is not None) if plan else None
        if plan is None or operation is None:
            await app(scope, receive, send)
            return
        name = sandbox_id or _named(scope)
        sandbox = self._registry.find(name) if name else None
        # of one that is gone nothing is known any more: it is not what `only` means
        metadata: Mapping[str, str] | None = sandbox.order.metadata if sandbox else {} if name else None
        if operation is Operation.CREATE:
            body = await read_body(receive, _BODY_BYTES)
            if body is None:
                await respond(send, 413, {"code": 413, "message": "request body too large"})
                return
            metadata, receive = _metadata(body), _replayed(body, receive)
        verdict = plan.judge(Call(operation, metadata), time.monotonic())
        await asyncio.sleep(verdict.delay_seconds)
        html = plan.faults.html_429 and operation is Operation.CREATE
        outlet = _Outlet(send, connection_of(scope), verdict.ending, html=html)
        if verdict.hangs:
            await _until_left(receive)
            outlet.cut()
        elif verdict.refusal:
            await _refuse(outlet, verdict.refusal)
        else:
            handled = self._handling(plan, app, operation, sandbox)
            await handled(_changed(plan, scope, operation), receive, outlet)
            if verdict.ending is Ending.STALLED:
                await _until_left(receive)
            await outlet.finish()
            self._count_command(plan, scope, sandbox)

    def _handling(self, plan: Plan, app: App, operation: Operation, sandbox: Sandbox | None) -> App:
        """The application, or what takes its place at a deletion that does not do what it says."""
        if operation is not Operation.DELETE or sandbox is None or sandbox.ending:
            return app
        fate = plan.deletion(sandbox.id, sandbox.order.metadata, time.monotonic())
        if isinstance(fate, Refusal):
            return functools.partial(_always, fate)
        return functools.partial(self._delete_later, sandbox, fate) if fate else app

    async def _delete_later(self, sandbox: Sandbox, seconds: float, scope: Scope, receive: Receive, send: Send) -> None:
        self._registry.kill_later(sandbox, seconds)
        await respond(send, 204)

    def _count_command(self, plan: Plan, scope: Scope, sandbox: Sandbox | None) -> None:
        if sandbox and scope["path"] == _START and plan.kills(sandbox.id, sandbox.order.metadata):
            plan.hits["dies_after_commands"] += 1
            sandbox.crash()

    def _shorten(self, sandbox: Sandbox) -> None:
        plan = self._plan
        life = plan.life_seconds(sandbox.order.metadata) if plan else None
        if plan and life is not None:
            asyncio.get_running_loop().call_later(life, self._crash, plan, sandbox)

    def _crash(self, plan: Plan, sandbox: Sandbox) -> None:
        if plan is self._plan and not sandbox.ending:
            plan.hits["dies_after_seconds"] += 1
            sandbox.crash()


class _Outlet:
    """What is sent to a client of an answer; called like the `send` it stands before."""

    def __init__(self, send: Send, connection: asyncio.Transport | None, ending: Ending, *, html: bool) -> None:
        self._send = send
        self._connection = connection
        self._ending = ending
        self._html = html
        self._over = False

    async def __call__(self, message: Message) -> None:
        if self._over or self._ending in (Ending.LOST, Ending.BAD_GATEWAY):
            return
        if self._html and message["type"] == "http.response.start" and message["status"] == 429:
            self._over = True
            await _send_html(self._send, message)
            return
        await self._send(message)
        if self._ending in (Ending.CUT, Ending.STALLED) and message.get("body"):
            self._over = True
            if self._ending is Ending.CUT:
                self.cut()

    def cut(self) -> None:
        """End the client's connection now."""
        if self._connection is not None:
            self._connection.abort()

    async def finish(self) -> None:
        """After the application has answered."""
        if self._ending is Ending.LOST:
            self.cut()
        elif self._ending is Ending.BAD_GATEWAY:
            await respond(self._send, 502, {"code": 502, "message": "bad gateway"})


def _operation(scope: Scope, *, inside: bool) -> Operation | None:
    method, path = scope["method"], scope["path"]
    if inside:
        if path == "/health":
            return Operation.PROBE
        if (method, path) == ("GET", "/files"):
            return Operation.DOWNLOAD
        return Operation.COMMAND if path.startswith("/process.") else Operation.FILES
    match method, *_parts(scope):
        case "POST", "sandboxes":
            return Operation.CREATE
        case "GET", "sandboxes":
            return Operation.LIST
        case "GET", "sandboxes", _:
            return Operation.INFO
        case "DELETE", "sandboxes", _:
            return Operation.DELETE
        case "POST", "sandboxes", _, "connect":
            return Operation.CONNECT
        case _, "sandboxes", _, *_:
            return Operation.CHANGE
    return None


def _parts(scope: Scope) -> list[str]:
    parts: list[str] = scope["path"].removeprefix("/v2").strip("/").split("/")
    return parts


def _named(scope: Scope) -> str | None:
    match _parts(scope):
        case "sandboxes", sandbox_id, *_:
            return sandbox_id
    return None


def _metadata(body: bytes) -> dict[str, str]:
    try:
        asked = json.loads(body or b"{}")
    except ValueError:
        return {}
    found = asked.get("metadata") if isinstance(asked, dict) else None
    return found if isinstance(found, dict) else {}


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives a body that was read already, and then what comes after it."""
    left = [body]

    async def again() -> Message:
        return {"type": "http.request", "body": left.pop(), "more_body": False} if left else await receive()

    return again


def _changed(plan: Plan, scope: Scope, operation: Operation) -> Scope:
    if operation is not Operation.LIST or not plan.faults.list_unfiltered:
        return scope
    plan.hits["list_unfiltered"] += 1
    kept = [pair for pair in scope["query_string"].split(b"&") if not pair.startswith(b"metadata=")]
    return {**scope, "query_string": b"&".join(kept)}


async def _until_left(receive: Receive) -> None:
    try:
        async with asyncio.timeout(_HUNG_SECONDS):
            while (await receive())["type"] != "http.disconnect":
                pass
    except TimeoutError:
        logger.info("a hung call was given up")


async def _always(refusal: Refusal, scope: Scope, receive: Receive, send: Send) -> None:
    await _refuse(send, refusal)


async def _refuse(send: Send, refusal: Refusal) -> None:
    if refusal.html:
        await _send_html(send, {"type": "http.response.start", "status": refusal.status, "headers": []})
        return
    pause = refusal.retry_after_seconds
    headers = {"retry-after": str(pause)} if pause is not None else None
    await respond(send, refusal.status, {"code": refusal.status, "message": refusal.message}, headers)


async def _send_html(send: Send, start: Message) -> None:
    kept = [pair for pair in start["headers"] if pair[0] not in (b"content-type", b"content-length")]
    head = [(b"content-type", b"text/html"), (b"content-length", b"%d" % len(_HTML)), *kept]
    await send({**start, "headers": head})
    await send({"type": "http.response.body", "body": _HTML})


def is_creation(scope: Scope) -> bool:
    """Whether a request to the control plane asks for a sandbox."""
    return scope["method"] == "POST" and _parts(scope) == ["sandboxes"] and "e2b-sandbox-id" not in headers_of(scope)
