"""The one-machine stack: a Redis and an E2B-compatible sandbox service of our own, where none is configured.

Everything started here is a direct child that ends with its parent, listens on a Unix socket or loopback only, and is
gone, with its temporary files, when its context ends.
"""

from __future__ import annotations

from deploy.embedded.redis_server import EmbeddedRedis, redis_binary
from deploy.embedded.sandboxes import LocalSandboxes
from deploy.embedded.stack import Stack, running_stack

__all__ = ["EmbeddedRedis", "LocalSandboxes", "Stack", "redis_binary", "running_stack"]
