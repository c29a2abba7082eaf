"""`rollout.engine: server` in a configuration: what is wrong with it, told before anything starts."""

from __future__ import annotations

import pytest

from megaverl.config import Config, InvalidConfig, load_config

NEEDED = ["model.path=absent", "data.train=absent.jsonl", "reward=exact_match"]
LOCAL = "rollout={engine: server, servers: {urls: ['http://127.0.0.1:8000']}}"


def load(*overrides: str) -> Config:
    return load_config(None, [*NEEDED, *overrides], check_paths=False)


def test_servers_on_the_loopback_need_no_token() -> None:
    assert load(LOCAL).rollout.servers.urls == ["http://127.0.0.1:8000"]
    both = load(
        LOCAL, "rollout.servers.urls=['http://[::1]:8000', 'https://localhost:1']"
    ).rollout.servers
    assert len(both.urls) == 2 and both.token_env is None
    # They are added as it goes on.
    assert load("rollout={engine: server}").rollout.servers.urls == []
    beyond = load(
        LOCAL,
        "rollout.servers={urls: ['http://10.0.0.5:80'], dns: 'http://pool:80', token_env: POOL_TOKEN}",
    )
    assert beyond.rollout.servers.token_env == "POOL_TOKEN"


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        (
            ["rollout.servers.urls=['http://10.0.0.5:8000']"],
            "rollout.servers.token_env",
            "not on the loopback",
        ),
        (
            ["rollout.servers.urls=['10.0.0.5:8000']"],
            "rollout.servers.urls.0",
            "expected a server's root",
        ),
        (
            ["rollout.servers.urls=['http://10.0.0.5']"],
            "rollout.servers.urls.0",
            "with its port",
        ),
        (
            ["rollout.servers.urls=['http://h:80/v1']"],
            "rollout.servers.urls.0",
            "without /v1",
        ),
        (
            ["rollout.servers={dns: 'https://pool:1', token_env: T}"],
            "rollout.servers.dns",
            "of a name",
        ),
        (["rollout.tp=2"], "rollout.tp", "start them with --tensor-parallel-size"),
        (["rollout.vllm={max_num_seqs: 8}"], "rollout.vllm", "options of their own"),
        (["rollout.sleep=true"], "rollout.sleep", "devices of their own"),
        (
            ["rollout.use_dynamic_batching=true"],
            "rollout.use_dynamic_batching",
            "rollout.servers.max_requests",
        ),
        (
            ["environment={name: signals, agents: own}"],
            "environment.agents",
            "Use agents: shared",
        ),
        (
            ["reshard.overlap=true"],
            "reshard.overlap",
            "read their weights from a folder",
        ),
        (
            ["rollout.servers.kind=sglang", "rollout.sampling={logit_bias: {}}"],
            "rollout.sampling.logit_bias",
            "not among what SGLang's server is asked for",
        ),
        (
            ["rollout.servers={kind: sglang, transfer: nccl}"],
            "rollout.servers.transfer",
            "Use transfer: folder",
        ),
        (
            ["rollout.servers={kind: sglang, transfer: direct}"],
            "rollout.servers.transfer",
            "Use transfer: folder",
        ),
        (
            ["rollout.servers={transfer: direct, folder: /tmp/w}"],
            "rollout.servers.folder",
            "writes no folder",
        ),
        (
            ["rollout.servers.transfer=direct", "actor.lora={}"],
            "rollout.servers.transfer",
            "sends no adapters",
        ),
    ],
)
def test_what_does_not_go_together(overrides: list[str], key: str, said: str) -> None:
    with pytest.raises(InvalidConfig) as raised:
        load(LOCAL, *overrides)
    assert any(
        mistake.key == key and said in mistake.message
        for mistake in raised.value.mistakes
    ), raised.value


def test_servers_of_another_engine() -> None:
    with pytest.raises(
        InvalidConfig,
        match=r"rollout.servers.urls .*is set, but rollout.engine is vllm",
    ):
        load("rollout.servers.urls=['http://127.0.0.1:8000']")
