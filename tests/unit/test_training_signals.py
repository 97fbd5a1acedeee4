"""What TRL's numbers tell."""

from __future__ import annotations

from trainer.signals import SIGNALS, advice, told


def test_every_known_signal_is_shown_with_a_sentence_and_unknown_ones_are_not() -> None:
    logs = {"reward": 0.5, "tools/call_frequency": 2.0, "something/else": 1.0, "episodes/aborted/sandbox_lost": 2.0}
    rows = told(logs)
    assert [row["signal"] for row in rows] == ["reward", "tools/call_frequency", "episodes/aborted/sandbox_lost"]
    assert [row["value"] for row in rows] == [0.5, 2.0, 2.0]
    assert rows[2]["tells"] == "of them: sandbox_lost"
    assert all(len(text) > 20 for text in SIGNALS.values())


def test_a_run_without_anything_to_learn_says_what_to_look_at_first() -> None:
    nothing = {
        "run_mean/tools/call_frequency": 0.0,
        "run_mean/reward": 0.0,
        "run_mean/frac_reward_zero_std": 1.0,
        "run_mean/completions/clipped_ratio": 0.9,
    }
    found = advice(nothing)
    assert len(found) == 4
    assert "no tool was called" in found[0]


def test_a_run_that_can_learn_gets_no_advice() -> None:
    fine = {"run_mean/tools/call_frequency": 3.0, "run_mean/reward": 0.4, "run_mean/frac_reward_zero_std": 0.5}
    assert advice(fine) == []
    assert advice({"reward": None}) == []


def test_a_batch_that_was_aborted_whole_is_pointed_at() -> None:
    assert "aborted" in advice({"reward": None, "episodes/aborted": 2.0})[0]


def test_episodes_that_ran_out_of_time_are_pointed_at_when_they_are_many() -> None:
    assert advice({}, {"window_exhausted": 1, "solved": 9}) == []
    (said,) = advice({}, {"window_exhausted": 2, "solved": 8})
    assert said.startswith("2 of 10 episodes ran out of time")
    assert "POLICY_WINDOW_SECONDS" in said
