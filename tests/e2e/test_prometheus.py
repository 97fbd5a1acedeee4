"""`rollout-farm up`, watched by a real Prometheus with the farm's own configuration while episodes run."""

from __future__ import annotations

import re
from pathlib import Path

from deploy.exit_codes import ExitCode
from orchestrator.vocabulary import SLOTS_PER_WORKER
from tests.e2e.commands import user
from tests.support.prometheus import running_prometheus
from tests.support.waiting import wait_until

TOKEN = "metrics-of-a-test"


def test_prometheus_sees_workers_and_each_episode_of_a_running_farm(tmp_path: Path) -> None:
    with user() as someone:
        up = someone.start("up", "--workers", "1", FARM_METRICS_PORT="0", FARM_METRICS_TOKEN=TOKEN)
        wait_until(lambda: "are up" in up.stdout, description="the farm is up", seconds=60)
        log = someone.home / ".farm" / "logs" / "orchestrator.log"
        where = wait_until(
            lambda: re.search(r"http://(127[\d.:]+)/metrics", log.read_text()), description="it says where"
        )
        assert where is not None
        with running_prometheus(tmp_path, where.group(1), TOKEN) as prometheus:
            wait_until(
                lambda: prometheus.value('farm_slots{state="idle"}') == SLOTS_PER_WORKER,
                seconds=20,
                description="idle slots",
            )
            code, run = someone.run("run", "weekly-sales", "--episodes", "4")
            assert code == ExitCode.OK, run.stderr
            wait_until(
                lambda: prometheus.value("sum(farm_episodes_total)") == 4, seconds=20, description="each episode"
            )
            assert prometheus.value('farm_cleanups_total{result="absent"}') == 8
            wait_until(
                lambda: (prometheus.value("sum(job:farm_episodes:rate5m)") or 0) > 0, seconds=20, description="its rate"
            )
            wait_until(lambda: prometheus.alerts() == set(), seconds=20, description="no condition of an alert holds")
        up.interrupt_group()
        assert up.wait(40) == ExitCode.OK, up.stderr
