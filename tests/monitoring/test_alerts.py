"""Alerts: what their conditions say, when they are told, and receivers that misbehave."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from megaverl.config.watching import AlertConfig, Condition, read_condition
from megaverl.monitoring import alerts as module
from megaverl.monitoring.alerts import Alerts, Receiver


@pytest.mark.parametrize(
    ("text", "condition"),
    [
        ("reward/mean < 0.1 for 20", Condition("reward/mean", "<", 0.1, 20)),
        ("actor/grad_norm>=1e3", Condition("actor/grad_norm", ">=", 1000.0)),
        ("  validation/pass@1 > -.5 ", Condition("validation/pass@1", ">", -0.5)),
        ("*/loss is nan", Condition("*/loss", "nan", 0.0)),
        ("actor/skipped > 0 for 3", Condition("actor/skipped", ">", 0.0, 3)),
        ("stalled for 1.5 min", Condition("stalled", ">=", 90.0)),
        ("disk < 5 GB", Condition("disk", "<", 5e9)),
    ],
)
def test_what_a_condition_says(text: str, condition: Condition) -> None:
    assert read_condition(text) == condition


@pytest.mark.parametrize(
    "text",
    [
        "",
        "reward/mean",
        "reward/mean < a",
        "reward/mean = 1",
        "0.1 > > 3",
        "stalled",
        "stalled for 0 s",
        "stalled for 3",
        "disk > 5 GB",
        "disk < 5",
        "a < 1 for 0",
        "a < 1 for 2.5",
        "a < 1 and b < 2",
        "__import__('os').system('true') < 1",
        "a.b() < 1",
    ],
)
def test_what_is_no_condition(text: str) -> None:
    with pytest.raises(ValueError, match="expected something like"):
        read_condition(text)


def told(
    folder: Path, when: str, values: list[float], name: str = "reward/mean"
) -> list[int]:
    """The steps, from 1, at which it is told."""
    steps, now = list[int](), 0
    alerts = Alerts(
        [AlertConfig(when=when)], folder, "run", lambda text: steps.append(now)
    )
    for now, value in enumerate(values, start=1):  # noqa: B007
        alerts.note(now, {name: value, "other": 0.0})
    alerts.close()
    return steps


def test_it_is_told_once_until_it_was_over(tmp_path: Path) -> None:
    low, high, nan = 0.0, 1.0, math.nan
    assert told(tmp_path, "reward/mean < 0.5", [high, low, low, high, low]) == [2, 5]
    assert told(
        tmp_path,
        "reward/mean < 0.5 for 3",
        [low, low, high, low, low, low, low, high, low],
    ) == [6]
    assert (
        told(tmp_path, "reward/mean < 0.5", [nan])
        == told(tmp_path, "reward/mean > 0.5", [nan])
        == []
    )
    assert told(tmp_path, "reward/* is nan", [low, nan, math.inf, high, -math.inf]) == [
        2,
        5,
    ]


def test_a_metric_that_is_never_seen_is_named(tmp_path: Path) -> None:
    warnings: list[str] = []
    alerts = Alerts(
        [AlertConfig(when="reward/maen < 1")], tmp_path, "run", warnings.append
    )
    for step in range(module.SEEN_AFTER + 5):
        alerts.note(step, {"reward/mean": 0.5})
    alerts.close()
    (warning,) = warnings
    assert (
        warning.startswith("alerts.0: no record so far has a metric 'reward/maen'")
        and "reward/mean" in warning
    )


class AlertTaker(ThreadingHTTPServer):
    """Keeps what it gets. `behave` answers, or does not."""

    daemon_threads = True

    def __init__(self, behave: Callable[[BaseHTTPRequestHandler], None]) -> None:
        self.got: list[dict[str, Any]] = []
        self.enough = threading.Event()
        self.ends = threading.Event()
        self.wanted = 1

        class Handler(BaseHTTPRequestHandler):
            def do_POST(handler) -> None:  # noqa: N805
                body = handler.rfile.read(int(handler.headers["content-length"]))
                self.got.append(json.loads(body))
                if len(self.got) >= self.wanted:
                    self.enough.set()
                behave(handler)

            def log_message(handler, format: str, *arguments: Any) -> None:  # noqa: N805
                return

        super().__init__(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(
            target=self.serve_forever, args=(0.05,), daemon=True
        )
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/secret"


@pytest.fixture
def taker() -> Iterator[Callable[..., AlertTaker]]:
    made: list[AlertTaker] = []

    def make(behave: Callable[[BaseHTTPRequestHandler], None]) -> AlertTaker:
        made.append(AlertTaker(behave))
        return made[-1]

    yield make
    for server in made:
        server.ends.set()
        server.shutdown()
        server.server_close()


def fine(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()


def broken(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(500)
    handler.end_headers()


def test_what_is_posted(
    tmp_path: Path, taker: Callable[..., AlertTaker], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = taker(fine)
    monkeypatch.setenv("WHERE", server.url)
    warnings: list[str] = []
    alerts = Alerts(
        [AlertConfig(when="a/loss is nan", post="$WHERE")],
        tmp_path,
        "mine",
        warnings.append,
    )
    alerts.note(7, {"a/loss": math.nan})
    alerts.close()
    text = "mine, step 7: a/loss is nan (a/loss is nan)"
    assert server.got == [
        {
            "run": "mine",
            "when": "a/loss is nan",
            "step": 7,
            "text": text,
            "value": "nan",
        }
    ]
    assert warnings == [f"alert: {text}"]


def test_a_receiver_that_fails_or_hangs_holds_nothing_up(
    tmp_path: Path, taker: Callable[..., AlertTaker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One answers 500, one says nothing, one a byte at a time: the fourth has every message, and `note` returns."""
    monkeypatch.setattr(module, "SECONDS_OF_ONE", 0.2)
    monkeypatch.setattr(module, "ATTEMPTS", 2)
    monkeypatch.setattr(module, "SECONDS_TO_FINISH", 30.0)

    def hang(handler: BaseHTTPRequestHandler) -> None:
        hanging.ends.wait(60)

    def drip(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("content-length", "1000")
        handler.end_headers()
        with suppress(OSError):  # nobody listens any more
            while not dripping.ends.wait(0.05):
                handler.wfile.write(b".")

    good, bad, hanging, dripping = taker(fine), taker(broken), taker(hang), taker(drip)
    good.wanted, dripping.wanted = 4, 2
    closed = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    closed.server_close()
    nobody = f"http://127.0.0.1:{closed.server_port}/"
    warnings: list[str] = []
    addresses = (good.url, bad.url, hanging.url, dripping.url, nobody)
    alerts = Alerts(
        [AlertConfig(when="a > 0", post=url) for url in addresses],
        tmp_path,
        "run",
        warnings.append,
    )
    for step in range(8):
        alerts.note(step, {"a": float(step % 2)})
    assert good.enough.wait(30) and dripping.enough.wait(30), (
        "an endless answer is one message's, not all of them"
    )
    alerts.close()
    assert [message["step"] for message in good.got] == [1, 3, 5, 7]
    assert len(bad.got) > 1, "a receiver that fails is asked again"
    complaints = [text for text in warnings if text.startswith("alerts: ")]
    ports = (bad.server_port, hanging.server_port, closed.server_port)
    assert all(any(str(port) in text for text in complaints) for port in ports)
    assert len(complaints) == len(ports) and not any(
        "secret" in text for text in complaints
    )


def test_messages_that_nobody_takes_are_not_kept_for_ever(
    taker: Callable[..., AlertTaker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WAITING", 3)
    server = taker(lambda handler: server.ends.wait(60))  # type: ignore[misc]
    warnings: list[str] = []
    receiver = Receiver(server.url, warnings.append)
    for number in range(5):  # one may be on its way
        receiver.give({"number": number})
    receiver.close(0.0)
    (warning,) = warnings
    assert "3 messages wait already" in warning


def test_stalls_and_the_disk_are_seen_beside_the_run(
    tmp_path: Path, taker: Callable[..., AlertTaker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOKS_EVERY", 0.01)
    server = taker(fine)
    server.wanted = 2
    whens = ("stalled for 0.02 s", "disk < 1000000 TB", "disk < 0 GB")
    alerts = Alerts(
        [AlertConfig(when=when, post=server.url) for when in whens],
        tmp_path,
        "run",
        lambda text: None,
    )
    alerts.note(3, {"a": 1.0})
    assert server.enough.wait(30)
    alerts.close()
    assert sorted(message["when"] for message in server.got) == [
        "disk < 1000000 TB",
        "stalled for 0.02 s",
    ]
