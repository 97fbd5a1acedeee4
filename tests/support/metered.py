"""A provider for measurements: E2B's control plane over a dictionary, on loopback, with both of its limits, each exact.

    python -m tests.support.metered --rate 5 --burst 5 --cap 1000 --log FILE [--silent]

prints its URL and serves until its standard input ends. No sandbox behind it: creations, deletions and infos only.
Creations come out of a token bucket that holds a burst and is filled continuously, as the GCRA limiters that answer
with `RateLimit-*` headers do: `burst` at once, `rate` a second in the long run, a refusal takes nothing. Both limits
are decided when a request arrives; the answer of a creation takes a tenth of a second more. Every creation is logged as
one JSON line: seconds (monotonic), status, how many were running afterwards. A `--silent` one names no Retry-After.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

_CREATE_SECONDS = 0.1
"""Between the decision and the answer; E2B's cloud takes about as long."""


class Meter:
    """The two limits and what runs."""

    def __init__(self, *, rate: float, burst: int, cap: int) -> None:
        self._rate, self._burst, self._cap = rate, float(burst), cap
        self._tokens, self._at = float(burst), time.monotonic()
        self._lock = threading.Lock()
        self._numbers = 0
        self.running: dict[str, dict[str, Any]] = {}
        self._by_key: dict[str, str] = {}

    def create(self, key: str, body: dict[str, Any], log: Any) -> tuple[int, str | float]:
        """(201, id), (429, seconds until a token) for the rate or (429, "") for concurrency."""
        with self._lock:
            now = time.monotonic()
            if key in self._by_key:
                return 201, self._by_key[key]
            self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
            self._at = now
            answer: tuple[int, str | float]
            if self._tokens < 1:
                answer = 429, (1 - self._tokens) / self._rate
            elif len(self.running) >= self._cap:
                answer = 429, ""
            else:
                self._tokens -= 1
                self._numbers += 1
                name = f"sbx{self._numbers}"
                self.running[name] = body
                if key:
                    self._by_key[key] = name
                answer = 201, name
            log.write(json.dumps([now, answer[0], len(self.running)]) + "\n")
            return answer

    def delete(self, name: str) -> bool:
        """Whether it ran."""
        with self._lock:
            return self.running.pop(name, None) is not None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    meter: Meter
    log: Any
    silent: bool

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the creations have a log of their own."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", "0"))) or b"{}")
        status, what = self.meter.create(self.headers.get("Idempotency-Key", ""), body, self.log)
        if status == 201:
            time.sleep(_CREATE_SECONDS)
            self._answer(201, _created(str(what)))
        elif what == "":
            self._answer(429, {"code": 429, "message": "you have reached the maximum number of concurrent sandboxes"})
        else:
            pause = {} if self.silent else {"Retry-After": str(max(1, math.ceil(float(what))))}
            self._answer(429, {"code": 429, "message": "slow down"}, pause)

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        body = self.meter.running.get(name)
        if body is None:
            self._answer(404, {"code": 404, "message": "not found"})
            return
        row = {**_created(name), "metadata": body.get("metadata", {}), "state": "running", "cpuCount": 2}
        row |= {
            "memoryMB": 512,
            "diskSizeMB": 512,
            "startedAt": "2026-01-01T00:00:00Z",
            "endAt": "2026-01-01T01:00:00Z",
        }
        self._answer(200, row)

    def do_DELETE(self) -> None:
        gone = self.meter.delete(self.path.rpartition("/")[2])
        self._answer(204 if gone else 404, None if gone else {"code": 404, "message": "not found"})

    def _answer(self, status: int, body: dict[str, Any] | None, headers: dict[str, str] | None = None) -> None:
        text = b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


def _created(name: str) -> dict[str, Any]:
    return {
        "templateID": "base",
        "sandboxID": name,
        "clientID": "c",
        "envdVersion": "0.6.13",
        "envdAccessToken": "token",
        "domain": None,
    }


def main() -> None:
    """Serve until standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--burst", type=int, required=True)
    parser.add_argument("--cap", type=int, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--silent", action="store_true")
    options = parser.parse_args()
    with options.log.open("w", buffering=1) as log:
        meter = Meter(rate=options.rate, burst=options.burst, cap=options.cap)
        handler = type("Handler", (_Handler,), {"meter": meter, "log": log, "silent": options.silent})
        with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever, daemon=True).start()
            sys.stdout.write(f"http://127.0.0.1:{server.server_address[1]}\n")
            sys.stdout.flush()
            sys.stdin.read()
            server.shutdown()


if __name__ == "__main__":
    main()
