"""A whole farm over TLS with a private authority, as a Redis user that may do no more than users.acl says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import NoPermissionError, ResponseError

from deploy.doctor.examine import examine_redis
from deploy.exit_codes import ExitCode
from orchestrator.errors import RedisUnavailable
from orchestrator.pool import Pool
from tests.support import whole_farm
from tests.support.certificates import Authority
from tests.support.farm import Field, open_field
from tests.support.ground import Ground
from tests.support.policies import weekly_sales
from tests.support.processes import ROOT
from tests.support.redis_processes import RedisProcess
from tests.support.tls_port import TlsPort

pytest_plugins = ["tests.support.farm"]

RULES = ROOT / "deploy" / "redis" / "users.acl"
PASSWORD = "s3cr3t/with:odd@signs#"
IN_URL = "s3cr3t%2Fwith%3Aodd%40signs%23"
EVALUATE = ("evaluate", "weekly-sales", "--script", "repair", "--output", "evaluated")
ADMIN = "user admin on >admin ~* &* +@all"


@dataclass
class Secured:
    """A server with the documented users, behind a port that wants TLS and a client's certificate."""

    server: RedisProcess
    port: int
    authority: Authority
    client: Path
    directory: Path

    def url(self, user: str = "farm") -> str:
        return f"rediss://{user}:{IN_URL}@localhost:{self.port}/0"

    def admin(self) -> Redis:
        return self.server.client(username="admin", password="admin")


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    directory = tmp_path_factory.mktemp("secured")
    users = directory / "users.acl"
    users.write_text(f"{RULES.read_text().replace('change-me-too', PASSWORD).replace('change-me', PASSWORD)}{ADMIN}\n")
    authority = Authority(directory)
    certificate, client = authority.issue("server", "localhost"), authority.issue("farm-client")
    with (
        RedisProcess(directory / "redis", [f"aclfile {users}"]) as server,
        TlsPort(server.port, certificate, client_ca=authority.ca_file) as port,
    ):
        yield Secured(server, port.port, authority, client, directory)


@pytest.fixture
def field(ground: Ground, secured: Secured) -> Iterator[Field]:
    """A farm there, with nothing in it."""
    with secured.admin() as admin:
        admin.flushall()
        admin.acl_log_reset()
    settings: dict[str, Any] = {
        "redis_url": secured.url(),
        "redis_ca_file": secured.authority.ca_file,
        "redis_certificate_file": secured.client,
        "lease_renew_seconds": 0.5,
        "lease_lost_seconds": 2,
        "log_level": "debug",
    }
    with open_field(ground, **settings) as opened:
        yield opened


def test_a_whole_farm_needs_no_more_than_the_documented_rights_and_shows_no_password(
    field: Field, secured: Secured, tmp_path: Path
) -> None:
    trainer = field.settings.model_copy(update={"redis_url": secured.url("farm-trainer")})
    with whole_farm.orchestrator(field.settings, tmp_path / "orchestrator") as (watching, metrics):
        worker = field.worker("w1", fresh=True)  # its own command line is looked at
        whole_farm.solve(field, as_trainer=trainer)
        done = [whole_farm.command(field.settings, tmp_path, *words) for words in whole_farm.COMMANDS]
        done.append(whole_farm.command(trainer, tmp_path, *EVALUATE))
        whole_farm.check_metrics(field, metrics)
        whole_farm.check_answers(field, metrics)
        lines = [Path(f"/proc/{pid}/cmdline").read_text() for pid in (*watching.alive(), *worker.alive())]
        whole_farm.lose_a_worker(field, worker)
        whole_farm.check_metrics(field, metrics)
    with secured.admin() as admin:
        assert [(entry["username"], entry["object"]) for entry in admin.acl_log()] == []
    assert [(*ran.args[3:], ran.stderr) for ran in done if ran.returncode] == []
    done.append(whole_farm.command(field.settings, tmp_path, "doctor"))
    shown = [text for ran in done for text in (ran.stdout, ran.stderr)]
    said = [text for ran in (watching, worker) for text in (ran.stdout, ran.stderr)]
    assert any("redis" in text.lower() for text in said), "the logs at level debug say nothing"
    everything = "\n".join([*shown, *said, *lines, repr(field.settings), repr(field.farm.redis)])
    assert PASSWORD not in everything
    assert IN_URL not in everything


@pytest.mark.parametrize("user", ["farm", "farm-trainer"])
@pytest.mark.parametrize(
    "words",
    [
        ("FLUSHALL",),
        ("FLUSHDB",),
        ("CONFIG", "GET", "dir"),
        ("KEYS", "*"),
        ("ACL", "LIST"),
        ("CLIENT", "LIST"),
        ("SHUTDOWN",),
        ("SELECT", "1"),
        ("GET", "another:application"),
        ("SET", "another:application", "1"),
        ("EVAL", "return redis.call('GET', 'another:application')", "0"),
        ("EVAL", "return redis.call('FLUSHALL')", "0"),
        ("PUBLISH", "rq:pubsub:w1-1", "{}"),
    ],
)
def test_what_the_farm_does_not_need_is_refused(secured: Secured, user: str, words: tuple[str, ...]) -> None:
    with secured.server.client(username=user, password=PASSWORD) as redis:
        with pytest.raises((NoPermissionError, ResponseError), match=r"permission|can't"):
            redis.execute_command(*words)


@pytest.mark.parametrize("words", [("SMEMBERS", "rq:workers"), ("LMOVE", "rq:queue:a", "rq:queue:b", "LEFT", "LEFT")])
def test_a_trainer_cannot_act_as_a_worker(secured: Secured, words: tuple[str, ...]) -> None:
    with secured.server.client(username="farm-trainer", password=PASSWORD) as redis:
        with pytest.raises(NoPermissionError):
            redis.execute_command(*words)


def changed(field: Field, **settings: Any) -> str:
    """What a trainer is told with these settings."""
    with pytest.raises(RedisUnavailable) as told:
        Pool(field.settings.model_copy(update=settings))
    assert PASSWORD not in str(told.value)
    assert IN_URL not in str(told.value)
    return str(told.value)


def test_what_is_wrong_with_tls_is_said_with_what_to_do(field: Field, secured: Secured, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other")
    url = secured.url()
    assert "set FARM_REDIS_CA_FILE" in changed(field, redis_ca_file=other.ca_file)
    assert "set FARM_REDIS_CA_FILE" in changed(field, redis_ca_file=None)
    assert "not for this host" in changed(field, redis_url=url.replace("localhost", "127.0.0.1"))
    for certificate in (None, other.issue("stranger")):
        assert "FARM_REDIS_CERTIFICATE_FILE" in changed(field, redis_certificate_file=certificate)
    assert "PEM files" in changed(field, redis_certificate_file=secured.authority.ca_file)  # without a key
    plain = url.replace(str(secured.port), str(secured.server.port))
    assert "begin REDIS_URL with redis:// if" in changed(field, redis_url=plain)
    off = f"{url.replace('localhost', '127.0.0.1')}?ssl_check_hostname=false"
    Pool(field.settings.model_copy(update={"redis_url": off})).close()


def test_a_wrong_password_and_a_missing_right_are_said_with_what_to_do(field: Field, secured: Secured) -> None:
    assert "refuses user or password" in changed(field, redis_url=secured.url().replace(IN_URL, "wrong"))
    assert "refuses user or password" in changed(field, redis_url=secured.url("nobody"))
    nobody = f"rediss://localhost:{secured.port}"
    assert "refuses user or password" in changed(field, redis_url=nobody)
    with secured.admin() as admin:
        admin.execute_command("ACL", "SETUSER", "weak", "on", f">{PASSWORD}", "~farm:*", "+ping", "+info")
    weak = field.settings.model_copy(update={"redis_url": secured.url("weak")})
    with Pool(weak) as pool, pytest.raises(RedisUnavailable, match=r"lacks a right.*deploy/redis/users\.acl"):
        pool.submit(weekly_sales())
    found = {finding.name: finding for finding in examine_redis(weak)}
    assert "users.acl" in found["Redis"].mend


@pytest.mark.parametrize("words", [("worker",), ("orchestrator",), ("status",), ("run", "weekly-sales")])
def test_a_command_that_lacks_a_right_ends_with_what_to_do(
    field: Field, secured: Secured, words: tuple[str, ...], tmp_path: Path
) -> None:
    with secured.admin() as admin:
        admin.execute_command("ACL", "SETUSER", "weak", "on", f">{PASSWORD}", "~farm:*", "+ping", "+info")
    weak = field.settings.model_copy(update={"redis_url": secured.url("weak")})
    done = whole_farm.command(weak, tmp_path, *words)
    assert done.returncode == ExitCode.REDIS
    assert "users.acl" in done.stderr
    assert "Traceback" not in done.stderr
    assert PASSWORD not in done.stderr


def test_a_database_other_than_0_needs_select(field: Field, secured: Secured) -> None:
    assert "+select" in changed(field, redis_url=secured.url().replace("/0", "/3"))
