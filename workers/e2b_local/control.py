"""The control plane: creating, finding, listing, extending and killing sandboxes, by API key.

Answers follow the cloud's: errors are `{"code", "message"}`, with an `error_code` where the SDK knows one. What only
this service has, by the same key:

    GET /admin/events                      every creation and end, with the number that exist after each
    GET /admin/creations[?since=SECONDS]   every creation attempt and its answer; live, and the most at once
    GET | PUT | DELETE /admin/faults       the faults that are injected now (`faults.Faults`), and their hits
"""

import hmac
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qsl, unquote

from pydantic import ValidationError

from workers.e2b_local.asgi import Receive, Scope, Send, headers_of, read_body, respond
from workers.e2b_local.attempts import Attempts
from workers.e2b_local.events import EventLog
from workers.e2b_local.faults import Faults, explain
from workers.e2b_local.idempotency import Idempotency, KeyMismatch
from workers.e2b_local.injection import Injector
from workers.e2b_local.sandboxes import Order, Registry, Sandbox, SandboxFailed

ENVD_VERSION = "0.6.13"
_DEFAULT_SECONDS = 300
_LONGEST_SECONDS = 86_400
_BODY_BYTES = 4_194_304
_PAGE_ROWS = 100


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, error_code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"code": status, "message": message, **({"error_code": error_code} if error_code else {})}


@dataclass(frozen=True)
class Offer:
    """What the service says of its sandboxes, and how many it keeps."""

    api_key: str
    templates: tuple[str, ...]
    max_sandboxes: int
    vcpus: int
    memory_mb: int
    disk_mb: int


@dataclass(frozen=True)
class Response:
    status: int
    value: object = None
    headers: dict[str, str] | None = None


class Control:
    """Routes control-plane requests."""

    def __init__(self, offer: Offer, registry: Registry, log: EventLog, attempts: Attempts, injector: Injector) -> None:
        self._offer = offer
        self._registry = registry
        self._log = log
        self._attempts = attempts
        self._injector = injector
        self._idempotency = Idempotency()

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answer = await self._answer(scope, receive)
        except Refused as refused:
            answer = Response(refused.status, refused.body)
        except SandboxFailed as failure:
            answer = Response(500, {"code": 500, "message": str(failure)})
        await respond(send, answer.status, answer.value, answer.headers)

    async def _answer(self, scope: Scope, receive: Receive) -> Response:
        headers = headers_of(scope)
        if not hmac.compare_digest(headers.get("x-api-key", "").encode(), self._offer.api_key.encode()):
            raise Refused(401, "Invalid API key")
        body = await _json_body(receive)
        match scope["method"], *scope["path"].removeprefix("/v2").strip("/").split("/"):
            case method, "admin", what:
                return self._administer(method, what, _query(scope), body)
            case "POST", "sandboxes":
                return await self._create(body, headers.get("idempotency-key"))
            case "GET", "sandboxes":
                return self._list(_query(scope))
            case method, "sandboxes", sandbox_id, *action:
                return await self._act(method, action, self._find(sandbox_id), body)
        raise Refused(404, "no such route")

    def _administer(self, method: str, what: str, query: dict[str, str], body: dict[str, Any]) -> Response:
        match method, what:
            case "GET", "events":
                return Response(200, self._log.rows())
            case "GET", "creations":
                return Response(200, self._creations(query))
            case "GET", "faults":
                return Response(200, self._injector.shown())
            case (("PUT" | "DELETE"), "faults"):
                self._set_faults(body if method == "PUT" else {})
                return Response(200, self._injector.shown())
        raise Refused(404, "no such route")

    def _creations(self, query: dict[str, str]) -> dict[str, Any]:
        try:
            since = float(query.get("since", 0))
        except ValueError:
            raise Refused(400, "since is a time in seconds since the epoch") from None
        return {
            "attempts": self._attempts.rows(since),
            "forgotten": self._attempts.forgotten,
            "live": self._log.live,
            "most_live": self._log.most_live(since),
        }

    def _set_faults(self, body: dict[str, Any]) -> None:
        try:
            self._injector.set(Faults.model_validate(body))
        except ValidationError as error:
            raise Refused(400, "; ".join(explain(problem) for problem in error.errors())) from None
        except ValueError as error:
            raise Refused(400, str(error)) from None

    def _find(self, sandbox_id: str) -> Sandbox:
        if sandbox := self._registry.find(sandbox_id):
            return sandbox
        raise Refused(404, f"sandbox \"{sandbox_id}\" doesn't exist or you don't have access to it")

    async def _act(self, method: str, action: list[str], sandbox: Sandbox, body: dict[str, Any]) -> Response:
        if method == "DELETE" and not action:
            if not await self._registry.kill(sandbox):
                self._find(sandbox.id)
            return Response(204)
        if method == "GET" and not action:
            return Response(200, self._detail(sandbox))
        if sandbox.ending:
            raise Refused(404, f'sandbox "{sandbox.id}" is ending')
        return self._change(method, action, sandbox, body)

    def _change(self, method: str, action: list[str], sandbox: Sandbox, body: dict[str, Any]) -> Response:
        match method, *action:
            case "POST", "timeout":
                self._registry.schedule(sandbox, time.time() + _seconds(body))
            case "POST", "refreshes":
                ends_at = time.time() + _seconds(body, "duration", 15)
                self._registry.schedule(sandbox, max(sandbox.ends_at, ends_at))
            case "POST", "connect":
                resumed, sandbox.state = sandbox.state == "paused", "running"
                self._registry.schedule(sandbox, max(sandbox.ends_at, time.time() + _seconds(body)))
                return Response(201 if resumed else 200, self._created(sandbox))
            case "POST", "pause":
                if sandbox.state == "paused":
                    raise Refused(409, f'sandbox "{sandbox.id}" is already paused')
                self._registry.pause(sandbox)
            case "GET", "metrics":
                return Response(200, [])
            case "PUT", "network":
                """There is no network to change: sandboxes stay offline whatever is asked for."""
            case _:
                raise Refused(404, "no such route")
        return Response(204)

    async def _create(self, body: dict[str, Any], key: str | None) -> Response:
        async def create() -> dict[str, Any]:
            if cap := self._injector.over_cap(self._offer.max_sandboxes):
                raise Refused(429, f"you have reached the maximum number of concurrent E2B sandboxes ({cap})")
            return self._created(await self._registry.create(order))

        order = self._order(body)
        if key is None:
            return Response(201, await create())
        try:
            return Response(201, await self._idempotency.once(key, body, create))
        except KeyMismatch:
            message = "the idempotency key was used before with another request"
            raise Refused(422, message, "idempotency_request_mismatch") from None

    def _order(self, body: dict[str, Any]) -> Order:
        template = body.get("templateID")
        if template not in self._offer.templates:
            known = ", ".join(self._offer.templates)
            raise Refused(404, f"template '{template}' not found: the local service has only {known}")
        return Order(
            template=template,
            timeout_seconds=_seconds(body),
            metadata=_texts(body, "metadata"),
            environment=_texts(body, "envVars"),
            allow_internet_access=body.get("allow_internet_access"),
            pause_on_timeout=bool(body.get("autoPause")),
        )

    def _list(self, query: dict[str, str]) -> Response:
        """The rows that match, newest first unless asked otherwise, a page at a time."""
        found = [box for box in self._registry.all() if _matches(box, query)]
        found.sort(key=lambda box: (box.started_at, box.id), reverse=query.get("order", "desc") == "desc")
        try:
            start, rows = int(query.get("nextToken") or 0), int(query.get("limit", _PAGE_ROWS))
        except ValueError:
            raise Refused(400, "limit and nextToken are numbers") from None
        headers = {"x-next-token": str(start + rows)} if start + rows < len(found) else None
        return Response(200, [self._row(box) for box in found[start : start + rows]], headers)

    def _created(self, sandbox: Sandbox) -> dict[str, Any]:
        return {
            "templateID": sandbox.order.template,
            "sandboxID": sandbox.id,
            "clientID": "local",
            "envdVersion": ENVD_VERSION,
            "envdAccessToken": sandbox.token,
            "trafficAccessToken": None,
            "domain": None,
        }

    def _row(self, sandbox: Sandbox) -> dict[str, Any]:
        return {
            "templateID": sandbox.order.template,
            "alias": sandbox.order.template,
            "sandboxID": sandbox.id,
            "clientID": "local",
            "startedAt": _timestamp(sandbox.started_at),
            "endAt": _timestamp(sandbox.ends_at),
            "cpuCount": self._offer.vcpus,
            "memoryMB": self._offer.memory_mb,
            "diskSizeMB": self._offer.disk_mb,
            "state": sandbox.state,
            "envdVersion": ENVD_VERSION,
            "metadata": sandbox.order.metadata,
        }

    def _detail(self, sandbox: Sandbox) -> dict[str, Any]:
        on_timeout = "pause" if sandbox.order.pause_on_timeout else "kill"
        return {
            **self._row(sandbox),
            "envdAccessToken": sandbox.token,
            "allowInternetAccess": sandbox.order.allow_internet_access,
            "lifecycle": {"onTimeout": on_timeout, "autoResume": False},
        }


def _query(scope: Scope) -> dict[str, str]:
    return dict(parse_qsl(scope["query_string"].decode("latin-1")))


def _matches(sandbox: Sandbox, query: dict[str, str]) -> bool:
    tests: dict[str, Callable[[str], bool]] = {
        "metadata": lambda text: _wanted(text).items() <= sandbox.order.metadata.items(),
        "state": lambda text: sandbox.state in text.split(","),
        "template": lambda text: sandbox.order.template == text,
        "startedAfter": lambda text: round(sandbox.started_at * 1e6) >= _microseconds(text),
    }
    return all(test(query[name]) for name, test in tests.items() if name in query)


def _wanted(text: str) -> dict[str, str]:
    # The SDK encodes a pair, then the pairs, then the parameter.
    return {unquote(name): unquote(value) for name, value in parse_qsl(text, keep_blank_values=True)}


def _microseconds(text: str) -> int:
    """A moment as precise as we tell it, so that a row's own start time finds that row."""
    try:
        return round(datetime.fromisoformat(text.replace(" ", "+")).timestamp() * 1e6)
    except ValueError:
        raise Refused(400, f"not a time: {text}") from None


def _timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _seconds(body: dict[str, Any], name: str = "timeout", default: int = _DEFAULT_SECONDS) -> float:
    value = body.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LONGEST_SECONDS:
        raise Refused(400, f"{name} must be between 0 and {_LONGEST_SECONDS} seconds")
    return float(value)


def _texts(body: dict[str, Any], name: str) -> dict[str, str]:
    value = body.get(name) or {}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise Refused(400, f"{name} must map names to strings")
    return value


async def _json_body(receive: Receive) -> dict[str, Any]:
    raw = await read_body(receive, _BODY_BYTES)
    if raw is None:
        raise Refused(413, "request body too large")
    try:
        body = json.loads(raw or b"{}")
    except ValueError:
        raise Refused(400, "the request body is not JSON") from None
    if not isinstance(body, dict):
        raise Refused(400, "the request body must be an object")
    return body
