"""What commands share: settings that reach a farm, the provider they name, how they end."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from deploy.embedded import running_stack
from orchestrator.connection import require_answer
from orchestrator.errors import RedisUnavailable, SettingsError
from orchestrator.settings import Settings, load_settings

if TYPE_CHECKING:
    from orchestrator.provider import Provider


def connected_settings() -> Settings:
    """Settings of the environment, or of the stack that runs in `state_dir`; raises when neither reaches a Redis."""
    settings = load_settings()
    found = running_stack(settings) or settings
    if found.redis_url is None:
        raise RedisUnavailable(
            f"REDIS_URL is not set and no embedded stack runs in {settings.state_dir}; "
            "set REDIS_URL, or start one with: rollout-farm up"
        )
    require_answer(found)
    return found


def provider_of(settings: Settings) -> Provider:
    """The sandbox provider that these settings name; makes no request."""
    from workers.sandboxes.provider import E2BProvider

    for name in ("E2B_API_URL", "E2B_SANDBOX_URL"):
        if os.environ.get(name) and settings.e2b_api_url is None:  # the SDK would follow it behind our back
            raise SettingsError(f"{name} is set; say FARM_E2B_API_URL={os.environ[name]} instead, or unset it")
    if settings.e2b_api_key is None:
        raise SettingsError("E2B_API_KEY is not set; set it, or run the embedded stack with: rollout-farm up")
    return E2BProvider(
        settings.e2b_api_key.get_secret_value(),
        api_url=settings.e2b_api_url,
        request_seconds=settings.budgets.create_request_seconds,
    )


def is_running(pid: int) -> bool:
    """Whether this host has such a process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def stop_as_ctrl_c_does() -> None:
    """Let SIGTERM and a closed terminal end this command in order, as Ctrl-C does: sandboxes are deleted first.

    What the caller ignores, as nohup does SIGHUP, stays ignored.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
