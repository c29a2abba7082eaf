"""Endpoint at which Prometheus, or anything that reads its text format, finds a run's newest metrics.

    GET http://HOST:PORT/metrics

    # TYPE megaverl_reward_mean gauge
    megaverl_reward_mean{run="grpo"} 0.53125

A metric's name is that of the run with other characters than letters and digits
replaced: `validation/pass@8` is `megaverl_validation_pass_8`. Prometheus keeps the
history; the endpoint knows the last record alone.
"""

from __future__ import annotations

import hmac
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, Gauge, make_wsgi_app

PREFIX = "megaverl_"
SECONDS_TO_END = 5.0
Wsgi = Callable[..., Iterable[bytes]]


def prometheus_name(name: str) -> str:
    """Return the name that Prometheus allows for a metric.

    Example:
        >>> prometheus_name("validation/pass@8")
        'megaverl_validation_pass_8'
    """
    return PREFIX + re.sub(r"\W+", "_", name)


class _Server(WSGIServer):
    daemon_threads = True
    allow_reuse_address = True


class _Quiet(WSGIRequestHandler):
    """Handler without an access log, and with a deadline for clients that send nothing."""

    timeout = 10

    def log_message(self, format: str, *args: Any) -> None:
        """Suppress the access log."""


class MetricsEndpoint:
    """Backend that serves the last value of every metric over HTTP.

    Args:
        run: the run's name, a label of every metric.
        host, port: interface and port to listen at; port 0: any free port.
        token: bearer token that every request must have; None: no token.

    Raises:
        OSError: the port is in use, or the interface does not exist.
    """

    def __init__(self, run: str, host: str, port: int, token: str | None) -> None:
        self._run, self._token = run, token
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        self._app: Wsgi = make_wsgi_app(self._registry)
        self._server = make_server(
            host, port, self._answer, server_class=_Server, handler_class=_Quiet
        )
        self.port = self._server.server_port
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics endpoint", daemon=True
        )
        self._thread.start()

    def write(self, step: int, seconds: float, metrics: Mapping[str, float]) -> None:
        """Replace the values of these metrics.

        Args:
            seconds: time of the record, in seconds since 1970.
        """
        times = {"step": float(step), "record_time_seconds": seconds}
        for name, value in {**metrics, **times}.items():
            allowed = prometheus_name(name)
            if allowed not in self._gauges:
                self._gauges[allowed] = Gauge(
                    allowed, name, ["run"], registry=self._registry
                )
            self._gauges[allowed].labels(self._run).set(value)

    def close(self) -> None:
        """Stop to listen."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(SECONDS_TO_END)

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Any:
        expected = f"Bearer {self._token}"
        sent = environ.get("HTTP_AUTHORIZATION", "")
        if self._token is not None and not hmac.compare_digest(
            sent.encode(), expected.encode()
        ):
            start("401 Unauthorized", [("Content-Type", "text/plain")])
            return [b"The request has another token than the run.\n"]
        return self._app(environ, start)
