"""What evaluations say: scores of scored episodes only, everything else beside them, and only like against like."""

from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from deploy.evaluation_tables import as_json, comparison_tables, report_table
from deploy.terminal import output
from orchestrator.vocabulary import Outcome
from tests.support.evaluations import a_result, an_evaluation
from trainer.evaluation.comparison import NotAlike, compare
from trainer.evaluation.report import summarize
from trainer.evaluation.results import Evaluation, Interrupted

YES, NO, LOST = Outcome.SOLVED, Outcome.WRONG_ANSWER, Outcome.SANDBOX_LOST


def test_a_score_is_the_mean_over_tasks_of_scored_episodes_only() -> None:
    report = summarize(an_evaluation([[YES, YES, LOST, LOST], [NO, NO, NO, YES]]))
    assert report.score is not None
    assert report.score.value == pytest.approx((1.0 + 0.25) / 2)
    assert [(row.scored, row.solved, row.score, row.failures) for row in report.by_task] == [
        (2, 2, 1.0, 2),
        (4, 1, 0.25, 0),
    ]


def test_failures_are_counted_on_their_own() -> None:
    report = summarize(an_evaluation([[YES, LOST], [LOST, Outcome.TRANSPORT]]))
    assert (report.failures.count, report.failures.share) == (3, 0.75)
    assert report.failures.outcomes == {"sandbox_lost": 2, "transport": 1}
    assert report.failures.unscored_tasks == ("task-1",)
    assert report.score is not None
    assert (report.score.value, report.score.tasks) == (1.0, 1)
    assert report.outcomes == {"solved": 1}


def test_pass_at_k_leaves_out_tasks_with_too_few_scored_episodes() -> None:
    report = summarize(an_evaluation([[YES, NO, NO, NO], [YES, NO, LOST, LOST]]))
    assert list(report.pass_at) == [1, 2, 4]
    assert report.pass_at[1].value == pytest.approx((0.25 + 0.5) / 2)
    assert report.pass_at[2].value == pytest.approx((0.5 + 1.0) / 2)
    assert (report.pass_at[4].value, report.pass_at[4].tasks) == (1.0, 1)


def test_nothing_but_failures_has_no_score_and_still_a_report() -> None:
    report = summarize(an_evaluation([[LOST], [LOST]]))
    assert report.score is None
    assert report.pass_at == {}
    assert report.latency.episode is None
    assert report.cost.per_scored_episode_usd is None


def test_latency_and_cost_of_failures_do_not_mix_with_those_of_scores() -> None:
    evaluation = an_evaluation([[YES, LOST]])
    good, bad = evaluation.results
    bad = bad.model_copy(update={"episode_seconds": 500.0, "cost_picousd": 3_000_000})
    report = summarize(replace(evaluation, results=(good, bad)))
    assert report.latency.episode is not None
    assert (report.latency.episode.count, report.latency.episode.mean) == (1, 2.0)
    assert report.cost.scored_usd == Decimal("0.000001")
    assert report.cost.failures_usd == Decimal("0.000003")
    assert report.cost.total_usd == Decimal("0.000004")


def test_what_interruptions_cost_is_in_the_total_and_stands_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    cut = (Interrupted(episode_id="e-1", cost_picousd=2_000_000), Interrupted(episode_id="e-2", cost_picousd=3_000_000))
    report = summarize(replace(an_evaluation([[YES, LOST]]), interrupted=cut))
    assert (report.cost.total_usd, report.cost.interrupted_usd) == (Decimal("0.000007"), Decimal("0.000005"))
    assert report.cost.per_scored_episode_usd == Decimal("0.000001")
    assert (report.scored, report.failures.count) == (1, 1)
    assert "interrupted 0.000005" in shown(capsys, report_table(report))


def test_an_episode_that_a_retry_made_good_counts_once_as_a_score_and_once_as_a_failure() -> None:
    evaluation = an_evaluation([[YES, LOST]])
    again = a_result(evaluation.identity, 0, 1, NO, retry=1)
    report = summarize(replace(evaluation, results=(*evaluation.results, again)))
    assert (report.scored, report.missing, report.failures.count) == (2, 0, 1)
    assert report.by_task[0].score == 0.5


def test_an_interrupted_evaluation_says_how_much_is_missing() -> None:
    whole = an_evaluation([[YES, NO], [NO, NO]])
    assert summarize(replace(whole, results=whole.results[:1])).missing == 3


# compare


def test_the_difference_is_paired_by_task() -> None:
    first = an_evaluation([[NO, NO], [YES, NO], [YES, YES]])
    second = an_evaluation([[YES, NO], [YES, YES], [YES, YES]])
    found = compare(first, second)
    assert [row.difference for row in found.by_task] == [0.5, 0.5, 0.0]
    assert found.difference is not None
    assert found.difference.value == pytest.approx(1 / 3)
    assert (found.better, found.worse) == (2, 0)
    assert found.difference.interval is not None
    assert (found.difference.interval.low, found.difference.interval.high) == (0.0, 0.5)
    assert not found.decided


def test_a_difference_on_every_task_is_decided() -> None:
    tasks = 8
    found = compare(an_evaluation([[NO, NO]] * tasks), an_evaluation([[YES, NO]] * tasks))
    assert found.decided
    assert not compare(an_evaluation([[NO, NO]] * tasks), an_evaluation([[NO, NO]] * tasks)).decided


def test_fewer_than_six_tasks_decide_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    few, enough = (compare(an_evaluation([[NO]] * count), an_evaluation([[YES]] * count)) for count in (5, 6))
    assert (few.decided, enough.decided) == (False, True)
    body = json.loads(as_json(few))
    assert (body["decided"], body["too_few_tasks"]) == (False, True)
    assert json.loads(as_json(enough))["too_few_tasks"] is False
    assert "too few tasks to tell" in shown(capsys, *comparison_tables(few))
    assert "too few tasks to tell" not in shown(capsys, *comparison_tables(enough))
    scored = compare(an_evaluation([[NO]] * 6), an_evaluation([[YES]] * 5 + [[LOST]]))
    assert scored.too_few_tasks, "only those with a score on both sides count"


def test_a_task_without_a_score_on_one_side_is_left_out_and_named() -> None:
    found = compare(an_evaluation([[NO], [LOST]]), an_evaluation([[YES], [YES]]))
    assert found.left_out == ("task-1",)
    assert [row.task_id for row in found.by_task] == ["task-0"]
    assert found.first.failures.count == 1
    assert compare(an_evaluation([[LOST]]), an_evaluation([[YES]])).difference is None


def test_zeros_of_a_side_that_ran_out_of_time_are_pointed_at(capsys: pytest.CaptureFixture[str]) -> None:
    late = Outcome.WINDOW_EXHAUSTED
    found = compare(an_evaluation([[YES, late], [late, LOST]]), an_evaluation([[YES, YES], [NO, late]], seed=0))
    notes = [note for note in found.notes if "ran out of time" in note]
    assert [note.split(" (")[0] for note in notes] == [
        "first: 2 of 3 episodes ran out of time",
        "second: 1 of 4 episodes ran out of time",
    ]
    assert all("their zeros tell of the machine as well" in note for note in notes)
    assert "ran out of time" in shown(capsys, *comparison_tables(found))
    without = compare(an_evaluation([[YES]]), an_evaluation([[NO]]))
    assert not [note for note in without.notes if "ran out of time" in note]


def refusal(first: Evaluation, second: Evaluation) -> str:
    with pytest.raises(NotAlike) as refused:
        compare(first, second)
    assert refused.value.reasons
    return str(refused.value)


def test_what_was_not_run_alike_is_refused_with_every_reason() -> None:
    text = refusal(an_evaluation([[YES], [NO]]), an_evaluation([[YES]], seed=3, template="large"))
    for reason in ("tasks only in the first: task-1", "seed: 0 and 3", 'template: "base" and "large"'):
        assert reason in text


def test_sandboxes_of_another_size_are_refused() -> None:
    first, second = an_evaluation([[YES]]), an_evaluation([[YES]])
    larger = second.results[0].model_copy(update={"resources": ("policy 8 vCPU 512 MiB", "verifier 2 vCPU 512 MiB")})
    assert "policy sandboxes: 2 vCPU 512 MiB and 8 vCPU 512 MiB" in refusal(first, replace(second, results=(larger,)))


def test_a_policy_that_never_submits_has_no_verifier_and_can_be_compared() -> None:
    first, second = an_evaluation([[YES]]), an_evaluation([[Outcome.NOT_SUBMITTED]])
    alone = second.results[0].model_copy(update={"resources": ("policy 2 vCPU 512 MiB",)})
    assert compare(first, replace(second, results=(alone,))).worse == 1


def test_an_evaluation_that_is_not_complete_is_refused() -> None:
    whole = an_evaluation([[YES, NO]])
    text = refusal(whole, replace(whole, results=whole.results[:1]))
    assert "the second evaluation is not complete: 1 episodes are missing" in text


# how they are shown


def shown(capsys: pytest.CaptureFixture[str], *tables: Any) -> str:
    for table in tables:
        output().print(table, soft_wrap=False)
    return capsys.readouterr().out


def test_a_report_is_shown_as_a_table_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    report = summarize(an_evaluation([[YES, LOST], [NO, NO]]))
    text = shown(capsys, report_table(report))
    assert "mean score" in text
    assert "sandbox_lost 1" in text
    body = json.loads(as_json(report))
    assert body["score"]["value"] == 0.5
    assert body["failures"]["count"] == 1
    assert body["cost"]["total_usd"] == "0.000004"


def test_a_comparison_is_shown_with_its_interval(capsys: pytest.CaptureFixture[str]) -> None:
    found = compare(an_evaluation([[NO]] * 50), an_evaluation([[YES]] * 50))
    text = shown(capsys, *comparison_tables(found))
    assert "+1.000 (+1.000 to +1.000)" in text
    assert "10 more in the JSON" in text
    assert json.loads(as_json(found))["decided"] is True
