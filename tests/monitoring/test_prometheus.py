"""The endpoint for Prometheus, read by its own parser, and the dashboard that shows its metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import httpx
import pytest

from megaverl.config import load_config
from megaverl.errors import ConfigError
from megaverl.monitoring.tracker import Tracker

pytest.importorskip("prometheus_client", reason="pip install 'megaverl[prometheus]'")

from prometheus_client.parser import text_string_to_metric_families

from megaverl.monitoring.prometheus import MetricsEndpoint, prometheus_name

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "configs" / "grafana" / "megaverl.json"


@pytest.fixture
def endpoint() -> Iterator[MetricsEndpoint]:
    made = MetricsEndpoint("a run", "127.0.0.1", 0, None)
    yield made
    made.close()


def read(port: int) -> dict[str, float]:
    text = httpx.get(f"http://127.0.0.1:{port}/metrics").raise_for_status().text
    samples = [
        sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]
    assert {sample.labels["run"] for sample in samples} <= {"a run"}
    return {sample.name: sample.value for sample in samples}


def test_the_newest_metrics_are_served(
    endpoint: MetricsEndpoint, tmp_path: Path
) -> None:
    assert read(endpoint.port) == {}
    with Tracker(tmp_path, ["jsonl"], only=["reward/*", "validation/*"]) as tracker:
        tracker.add("run.metrics_port", lambda: endpoint)
        tracker.log(1, {"reward/mean": 0.25, "actor/loss": 1.0})
        tracker.log(2, {"reward/mean": 0.5, "validation/pass@8": float("nan")})
        served = read(endpoint.port)
        assert str(served.pop("megaverl_validation_pass_8")) == "nan"
        assert served.pop("megaverl_record_time_seconds") > 1e9
        assert served == {"megaverl_reward_mean": 0.5, "megaverl_step": 2.0}
    with pytest.raises(httpx.ConnectError):
        read(endpoint.port)


def test_a_port_in_use_does_not_stop_a_run(
    endpoint: MetricsEndpoint, tmp_path: Path
) -> None:
    warnings: list[str] = []
    with Tracker(tmp_path, ["jsonl"], warn=warnings.append) as tracker:
        second = ("a run", "127.0.0.1", endpoint.port, None)
        tracker.add("run.metrics_port", lambda: MetricsEndpoint(*second))
        tracker.log(1, {"reward/mean": 0.25})
    assert len(warnings) == 1 and "Address already in use" in warnings[0]


def test_a_token_is_asked_for() -> None:
    endpoint = MetricsEndpoint("a run", "127.0.0.1", 0, "secret")
    try:
        url = f"http://127.0.0.1:{endpoint.port}/metrics"
        assert httpx.get(url).status_code == 401
        wrong = {"authorization": "Bearer other"}
        assert httpx.get(url, headers=wrong).status_code == 401
        right = {"authorization": "Bearer secret"}
        assert httpx.get(url, headers=right).status_code == 200
    finally:
        endpoint.close()


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ("{metrics_host: 0.0.0.0}", "metrics_port is null"),
        ("{metrics_port: 9400, metrics_host: 0.0.0.0}", "Name a variable with a token"),
        ("{metrics_port: 9400, metrics_host: here}", "the address of an interface"),
        ("{metrics_port: 70000}", "65535"),
        (
            "{metrics_port: 9400, metrics_token_env: NOT_SET}",
            "no variable NOT_SET is set",
        ),
    ],
)
def test_what_cannot_be_opened_is_refused(run: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(None, ["model.path=m", "data.train=d", f"run={run}"])


def test_the_dashboard_shows_metrics_that_exist() -> None:
    table = (ROOT / "docs" / "reference.md").read_text()
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    patterns = [
        prometheus_name(name.replace("*", "STAR")).replace("STAR", "*")
        for row in rows
        for name in re.findall(r"`([^`]+)`", row.split("|")[1])
    ]
    dashboard = json.loads(DASHBOARD.read_text())
    names = set(re.findall(r"megaverl_\w+(?=\{)", json.dumps(dashboard)))
    assert len(names) > 20
    missing = {
        name for name in names if not any(fnmatch(name, one) for one in patterns)
    }
    assert missing == set()
