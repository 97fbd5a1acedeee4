"""Settings: where values come from, which one wins, and what a wrong one says."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.errors import SettingsError
from orchestrator.settings import Settings, as_variables, load_settings, unknown_variables


@pytest.fixture(autouse=True)
def _own_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def test_nothing_set_means_the_embedded_stack_with_the_designs_budgets() -> None:
    settings = load_settings()
    assert (settings.redis_url, settings.e2b_api_key, settings.e2b_api_url) == (None, None, None)
    assert settings.budgets.policy_window_seconds == 120
    assert settings.budgets.deadline_seconds == 600
    assert settings.limits() == (20, 0)


def test_the_usual_names_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:6379/3")
    monkeypatch.setenv("E2B_API_KEY", "e2b_abc")
    monkeypatch.setenv("FARM_QUEUE", "night")
    monkeypatch.setenv("FARM_BUDGETS__COMMAND_SECONDS", "7")
    settings = load_settings()
    assert settings.redis_url == "redis://127.0.0.1:6379/3"
    assert settings.e2b_api_key is not None
    assert settings.e2b_api_key.get_secret_value() == "e2b_abc"
    assert (settings.queue, settings.budgets.command_seconds) == ("night", 7)


NAMES = {"redis_url": "REDIS_URL", "e2b_api_key": "E2B_API_KEY"}
UNSET = [name for name, field in Settings.model_fields.items() if field.default is None]


@pytest.mark.parametrize("value", ["", " "])
@pytest.mark.parametrize("name", UNSET)
def test_an_empty_variable_unsets_what_may_be_unset_whatever_dotenv_says(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    variable = NAMES.get(name, f"FARM_{name.upper()}")
    Path(".env").write_text(f"{variable}=7\n")
    monkeypatch.setenv(variable, value)
    assert getattr(load_settings(), name) is None


def test_what_may_be_unset_is_known() -> None:
    tls = {"redis_ca_file", "redis_certificate_file", "redis_key_file"}
    secrets = {"e2b_api_key", "terminus_token", "metrics_token"}
    assert set(UNSET) == {"redis_url", "e2b_api_url", "plan", "metrics_port"} | tls | secrets


def test_an_empty_number_stays_a_wrong_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARM_CONCURRENCY_LIMIT", "")
    with pytest.raises(SettingsError, match="FARM_CONCURRENCY_LIMIT: "):
        load_settings()


@pytest.mark.parametrize("plan", [None, "pro"])
def test_another_process_reads_the_same_settings_whatever_its_dotenv_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plan: str | None
) -> None:
    (tmp_path / "ca.pem").touch()
    given = load_settings(
        redis_url="rediss://u:p@host:6379/3",
        redis_ca_file=tmp_path / "ca.pem",
        e2b_api_key="e2b_abc",
        metrics_port=0,
        plan=plan,
        creation_rate=0.125,
        state_dir=tmp_path / "state",
        budgets={"command_seconds": 0.1, "transfer_bytes": 7},
    )
    contrary = ["FARM_REDIS_URL=redis://x", "FARM_REDIS_CERTIFICATE_FILE=/none", "FARM_E2B_API_URL=http://x"]
    contrary += ["FARM_PLAN=hobby", "FARM_QUEUE=other", "FARM_METRICS_TOKEN=t", "FARM_TRANSCRIPT_BYTES=0"]
    contrary += ['FARM_BUDGETS={"message_seconds": 1}', "FARM_BUDGETS__COMMAND_SECONDS=3"]
    Path(".env").write_text("\n".join(contrary))
    for name, value in as_variables(given).items():
        monkeypatch.setenv(name, value)
    read = load_settings()
    assert read.limits() == given.limits() == ((20, 0.125) if plan is None else (100, 0.125))
    limits = {"plan", "concurrency_limit", "creation_rate"}
    assert read.model_dump(exclude=limits) == given.model_dump(exclude=limits)


def test_a_key_is_in_no_repr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("E2B_API_KEY", "e2b_secret")
    assert "e2b_secret" not in repr(load_settings())


def test_dotenv_is_read_and_a_real_variable_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    Path(".env").write_text("REDIS_URL=redis://from-file:6379/0\nFARM_QUEUE=from-file\nSOMETHING_ELSE=1\n")
    monkeypatch.setenv("FARM_QUEUE", "from-environment")
    settings = load_settings()
    assert settings.redis_url == "redis://from-file:6379/0"
    assert settings.queue == "from-environment"


def test_an_override_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARM_QUEUE", "from-environment")
    assert load_settings(queue="given").queue == "given"


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("FARM_QUEUE", "Not A Queue"),
        ("FARM_CONCURRENCY_LIMIT", "0"),
        ("FARM_CONCURRENCY_LIMIT", "many"),
        ("FARM_CREATION_RATE", "inf"),
        ("FARM_CREATION_RATE", "-1"),
        ("FARM_CREATION_RATE", "1e-300"),
        ("FARM_PLAN", "enterprise"),
        ("FARM_LOG_LEVEL", "loud"),
        ("FARM_LEASE_LOST_SECONDS", "nan"),
        ("FARM_BUDGETS__COMMAND_SECONDS", "0"),
        ("FARM_BUDGETS__COMMAND_BYTES", "200000"),
        ("FARM_BUDGETS__NO_SUCH_BUDGET", "1"),
    ],
)
def test_a_wrong_value_is_one_line_that_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsError) as caught:
        load_settings()
    text = str(caught.value)
    assert text.startswith(f"{variable}: ")
    assert len(text.splitlines()) == 1
    assert value in text
    assert "correct it" in text


def test_every_wrong_value_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARM_QUEUE", "!")
    monkeypatch.setenv("FARM_PLAN", "?")
    with pytest.raises(SettingsError) as caught:
        load_settings()
    assert {line.partition(":")[0] for line in str(caught.value).splitlines()} == {"FARM_QUEUE", "FARM_PLAN"}


@pytest.mark.parametrize(("plan", "limits"), [("hobby", (20, 1.0)), ("pro", (100, 5.0))])
def test_a_plan_presets_both_limits(monkeypatch: pytest.MonkeyPatch, plan: str, limits: tuple[int, float]) -> None:
    monkeypatch.setenv("FARM_PLAN", plan)
    assert load_settings().limits() == limits


def test_an_explicit_limit_wins_over_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARM_PLAN", "pro")
    monkeypatch.setenv("FARM_CONCURRENCY_LIMIT", "7")
    assert load_settings().limits() == (7, 5.0)


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_settings().queue = "other"


def test_the_example_file_names_only_real_settings_with_their_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    example = Path(__file__).parents[2] / ".env.example"
    commented = [line[2:] for line in example.read_text().splitlines() if line.startswith("# ") and "=" in line]
    rows = dict(line.split("=", 1) for line in commented if line.split("=")[0].replace("_", "").isalnum())
    places = {"REDIS_URL", "E2B_API_KEY", "FARM_E2B_API_URL", "FARM_PLAN", "FARM_METRICS_PORT"}
    defaults = load_settings()
    for name, value in rows.items():
        if name not in places:
            monkeypatch.setenv(name, value)
    read = load_settings()
    assert len(rows) > 15
    assert read == defaults
    known = {f"FARM_{field.upper()}" for field in type(read).model_fields}
    assert {name.split("__")[0] for name in rows} - places <= known


@pytest.mark.parametrize(
    ("name", "value"),
    [("FARM_LEASE_RENEW_SECONDS", "30"), ("FARM_TRAINER_BEAT_SECONDS", "29"), ("FARM_BUDGETS", "xyz")],
)
def test_what_cannot_work_together_is_one_readable_error(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match="FARM_"):
        load_settings()


def test_by_default_a_killed_worker_is_noticed_in_time_to_be_settled_within_twenty_seconds() -> None:
    """Its lease runs out, the next round sees it; five seconds are left for listing, deleting and confirming."""
    settings = load_settings()
    assert settings.lease_lost_seconds + settings.reconcile_seconds <= 15


def test_a_misspelt_name_is_told_with_the_nearest_one() -> None:
    told = unknown_variables(
        ["FARM_CONCURENCY_LIMIT", "FARM_BUDGETS__DEADLINE_SECONDS", "FARM_PLAN", "PATH", "FARM_XYZZY"]
    )
    assert told == [
        "FARM_CONCURENCY_LIMIT is no setting of the farm; did you mean FARM_CONCURRENCY_LIMIT?",
        "FARM_XYZZY is no setting of the farm",
    ]


def test_a_misspelt_budget_is_told_with_the_nearest_budget_or_with_all() -> None:
    near, none = unknown_variables(["FARM_BUDGETS__COMAND_SECONDS", "FARM_BUDGETS__NOPE"])
    assert near.endswith("did you mean FARM_BUDGETS__COMMAND_SECONDS?")
    assert "after FARM_BUDGETS__ goes one of ADMISSION_SECONDS, " in none
    assert "CLEANUP_SECONDS" in none


def test_a_misspelt_budget_in_dotenv_is_told_with_the_nearest_one() -> None:
    Path(".env").write_text("FARM_BUDGETS__COMAND_SECONDS=3\n")
    with pytest.raises(SettingsError, match="did you mean FARM_BUDGETS__COMMAND_SECONDS"):
        load_settings()


def test_a_dotenv_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    (tmp_path / ".env").write_bytes("FARM_QUEUE=n\u00e4chte\n".encode("latin-1"))
    with pytest.raises(SettingsError) as caught:
        load_settings()
    assert str(caught.value) == f"{tmp_path / '.env'}: is not UTF-8 (byte 12); save it as UTF-8, or remove it"


def test_receipts_are_kept_for_thirty_days_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings().receipt_retention_seconds == 30 * 24 * 60 * 60
    monkeypatch.setenv("FARM_RECEIPT_RETENTION_SECONDS", str(10**16))  # Redis could not write such a receipt
    with pytest.raises(SettingsError, match="FARM_RECEIPT_RETENTION_SECONDS"):
        load_settings()


SECRETS = ["E2B_API_KEY", "FARM_E2B_API_KEY", "FARM_METRICS_TOKEN", "FARM_TERMINUS_TOKEN"]


@pytest.mark.parametrize("name", SECRETS)
def test_the_line_end_of_a_secrets_file_is_no_part_of_it(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, " s3cret\n")
    held = getattr(load_settings(), name.removeprefix("FARM_").lower())
    assert held.get_secret_value() == "s3cret"


@pytest.mark.parametrize("secret", ["s3cret s3cret", "s3cret\ns3cret", "s3cretä", "s3cret\x00"])
@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_that_no_header_can_carry_is_refused_unshown(name: str, secret: str) -> None:
    field = name.removeprefix("FARM_").lower()
    with pytest.raises(SettingsError, match="visible ASCII") as refused:
        load_settings(**{field: secret})
    assert "s3cret" not in str(refused.value)
