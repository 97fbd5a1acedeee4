"""Budgets of chaos episodes: short, so that a loss is noticed soon, and long enough for a farm that is mended."""

from __future__ import annotations

from orchestrator.settings import Budgets

BUDGETS = Budgets(
    admission_seconds=120,
    deadline_seconds=90,
    policy_window_seconds=60,
    first_lifetime_seconds=60,
    policy_lifetime_seconds=120,
    verifier_lifetime_seconds=60,
    command_seconds=5,
    message_seconds=12,
    verifier_command_seconds=10,
    cleanup_seconds=30,
)
