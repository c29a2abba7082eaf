"""`rollout.engine: server`: where the servers are, who may speak with them, and what they cannot do for a run."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from megaverl.config.errors import ConfigIssue, listed
from megaverl.config.roles import SAMPLING
from megaverl.config.schema import Config
from megaverl.rollout.server_api import SGLANG_SAMPLING, is_loopback, url_problem

_KEY = "rollout.servers"
_ALL_KNOW = {*SAMPLING, "top_k", "stop_token_ids", "ignore_eos"}


def server_mistakes(config: Config) -> Iterator[ConfigIssue]:
    """Every mistake in `rollout.servers`, and between it and the rest."""
    rollout = config.rollout
    servers = rollout.servers
    if rollout.engine != "server":
        for name in servers.changed():
            yield ConfigIssue(f"{_KEY}.{name}", f"is set, but rollout.engine is {rollout.engine}. Use engine: server.")
        return
    named = [(f"{_KEY}.urls.{number}", url) for number, url in enumerate(servers.urls)]
    if servers.dns is not None:
        named.append((f"{_KEY}.dns", servers.dns))
    for key, url in named:
        if problem := url_problem(url):
            yield ConfigIssue(key, problem)
        elif servers.token_env is None and not is_loopback(url):
            yield ConfigIssue(
                f"{_KEY}.token_env",
                f"is null, and {url} is not on the loopback: anybody in its network could use the server. Start it "
                "with a token, and name the environment variable that has it.",
                involves=(key,),
            )
    if servers.dns is not None and urlsplit(servers.dns).scheme == "https":
        yield ConfigIssue(f"{_KEY}.dns", "found https; a certificate is of a name, not of the addresses behind it.")
    for name, text in (
        ("tp", "servers lay their models out themselves: start them with --tensor-parallel-size (SGLang: --tp)."),
        ("vllm", "servers have options of their own: start them with these."),
        ("sleep", "servers have devices of their own."),
        ("use_dynamic_batching", "servers choose by themselves; see rollout.servers.max_requests."),
    ):
        if rollout.changed(name):
            yield ConfigIssue(f"rollout.{name}", f"is set, but rollout.engine is server: {text} Leave it out.")
    if config.environment.agents == "own":
        yield ConfigIssue(
            "environment.agents",
            "found 'own'; servers hold one actor's weights. Use agents: shared.",
            involves=("rollout.engine",),
        )
    if config.reshard.overlap:
        yield ConfigIssue("reshard.overlap", "is set, but servers read their weights from a folder. Leave it out.")
    yield from _sampling(config)


def _sampling(config: Config) -> Iterator[ConfigIssue]:
    if config.rollout.servers.kind != "sglang":
        return
    known = {*_ALL_KNOW, *SGLANG_SAMPLING}
    for key, given in (
        ("rollout.sampling", config.rollout.sampling),
        ("trainer.validation_sampling", config.trainer.validation_sampling),
    ):
        for name in given.keys() - known:
            text = f"is not among what SGLang's server is asked for: {listed(sorted(known))}. Leave it out."
            yield ConfigIssue(f"{key}.{name}", text, involves=("rollout.servers.kind",))
