"""What an operator reads of an orchestrator's rounds: what is new, and not the same lines every two seconds."""

from __future__ import annotations

import logging

import pytest

from deploy.logs import Lines
from deploy.report_log import ReportLog
from orchestrator.reconciler import Report
from orchestrator.unresolved import Kind

STUCK = (Kind.ALLOCATION, "e-1-a1-policy")


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING)
    return caplog


def lines(log: pytest.LogCaptureFixture) -> list[str]:
    """What was logged since this was asked last, without the time."""
    shown = [Lines().format(record).partition(" deploy.report_log ")[2] for record in log.records]
    log.clear()
    return shown


def test_what_is_unresolved_is_logged_once_and_again_when_its_reason_changes(log: pytest.LogCaptureFixture) -> None:
    reports = ReportLog()
    for _ in range(5):
        reports.add(Report(failures={STUCK: "500"}))
    assert lines(log) == ["unresolved allocation=e-1-a1-policy error=500"]
    reports.add(Report(failures={STUCK: "404", (Kind.EPISODE, "e-2"): "unreadable"}))
    assert lines(log) == ["unresolved allocation=e-1-a1-policy error=404", "unresolved episode=e-2 error=unreadable"]


def test_what_comes_back_after_it_was_settled_is_logged_again(log: pytest.LogCaptureFixture) -> None:
    reports = ReportLog()
    for report in (Report(failures={STUCK: "500"}), Report(), Report(failures={STUCK: "500"})):
        reports.add(report)
    assert len(lines(log)) == 2


def test_what_was_done_is_logged_by_id(log: pytest.LogCaptureFixture) -> None:
    ReportLog().add(Report(finished=["e-1", "e-2"], orphans=["sbx"]))
    assert lines(log) == ["reconciled finished=e-1,e-2 orphans_deleted=sbx"]


def test_a_round_without_events_is_silent(log: pytest.LogCaptureFixture) -> None:
    ReportLog().add(Report())
    assert lines(log) == []
