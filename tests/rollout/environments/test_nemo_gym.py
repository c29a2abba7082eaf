"""NeMo Gym's agents and resources servers as episodes: the real package in a process of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megaverl.config.files_and_packages import source_problem
from megaverl.data.sources import kind_of, open_source
from megaverl.errors import ConfigError, DataError, EnvironmentFault
from megaverl.rollout.environments import Limits, check_options
from megaverl.rollout.environments.nemo_gym import COLUMN, GymServers, StartedServers
from tests.launcher import Launcher, free_port
from tests.rollout.environments.grpo_step import take_grpo_step
from tests.rollout.environments.harness_python import harness_python
from tests.rollout.environments.test_gateway import Says, engine, played, written

PYTHON = harness_python("nemo-gym")
__all__ = ["engine"]  # its fixture

SPELL = {
    "type": "function",
    "name": "spell",
    "strict": True,
    "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
}
EXAMPLE = (
    "resources_servers/example_single_tool_call/configs/example_single_tool_call.yaml"
)
CALL = '<tool_call>{"name": "spell", "arguments": {"word": "abc"}}</tool_call>$'
LIMITS = Limits(max_turns=3, turn_tokens=80, total_tokens=400)


class Ports:
    """Ports that are chosen once: of the head server, and of the gateway of a run."""

    def __init__(self) -> None:
        self.head, self.run = free_port(), free_port()


@pytest.fixture(scope="module")
def ports() -> Ports:
    return Ports()


@pytest.fixture(scope="module")
def options(
    tmp_path_factory: pytest.TempPathFactory, ports: Ports
) -> Iterator[dict[str, Any]]:
    """Options with servers of this module: an agent that asks the episode's gateway, and one that asks a run's."""
    folder = tmp_path_factory.mktemp("gym")
    server = {
        "entrypoint": str(Path(__file__).with_name("gym_server.py")),
        "domain": "other",
        "verified": False,
    }

    def agent(model_server: str) -> dict[str, Any]:
        settings = {
            "entrypoint": "app.py",
            "resources_server": {"type": "resources_servers", "name": "letters"},
            "model_server": {"type": "responses_api_models", "name": model_server},
        }
        return {"responses_api_agents": {"simple_agent": settings}}

    model = {"entrypoint": "app.py", "host": "127.0.0.1", "port": ports.run}
    config = {
        "letters": {"resources_servers": {"letters": server}},
        "speller": agent("policy_model"),
        "far_speller": agent("model_of_the_run"),
        "model_of_the_run": {"responses_api_models": {"gateway": model}},
        "head_server": {"host": "127.0.0.1", "port": ports.head},
    }
    # JSON is YAML.
    (folder / "own.yaml").write_text(json.dumps(config))
    paths = [str(folder / "own.yaml"), EXAMPLE]
    yield {"config_paths": paths, "python": PYTHON, "agent": "speller"}
    for servers in GymServers._shared.values():
        if isinstance(servers, StartedServers):
            servers.process.kill()


def write_rows(file: Path, *words: str, **more: Any) -> str:
    """Write a file of NeMo Gym with one row for each word, and return it as a source."""
    rows = [
        {
            "responses_create_params": {
                "input": [
                    {"role": "developer", "content": "be brief"},
                    {"role": "user", "content": f"spell {word}"},
                ],
                "tools": [SPELL],
            },
            "word": word,
            **more,
        }
        for word in words
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"nemo_gym:{file}"


def test_rows_of_a_file(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", "abc", "de")
    assert kind_of(source) == "nemo_gym" and source_problem(source) == ""
    rows = open_source(source)
    assert len(rows) == 2 and rows.where(1) == f"{source}, line 2"
    assert rows[1]["prompt"] == "spell de" and rows[1][COLUMN]["row"]["word"] == "de"
    assert json.loads(json.dumps(rows[1])) == rows[1], "it can travel"
    other = open_source(write_rows(tmp_path / "other.jsonl", "abc"))
    assert rows.fingerprint != other.fingerprint
    assert "there is no file" in source_problem("nemo_gym:none.jsonl")
    with pytest.raises(DataError, match=r"none.jsonl cannot be read"):
        open_source("nemo_gym:none.jsonl")
    for text, said in (("{", "is no JSON"), ("{}", "has no responses_create_params")):
        (tmp_path / "bad.jsonl").write_text(f"\n{text}\n")
        with pytest.raises(DataError, match=f"bad.jsonl, line 2 {said}"):
            open_source(f"nemo_gym:{tmp_path / 'bad.jsonl'}")


def test_an_agent_calls_a_tool_and_its_verifier_rewards_the_answer(
    options: dict[str, Any], tmp_path: Path
) -> None:
    row = open_source(write_rows(tmp_path / "rows.jsonl", "abc"))[0]
    view, drawn = played(
        Says(CALL, "done$"), options, row, name="nemo_gym", limits=LIMITS
    )
    assert view.prompt == written("<system>be brief$\n<user>spell abc$\n<assistant>")
    assert view.tokens == written(f'{CALL}\n<tool>"a b c"$\n<assistant>done$')
    own = [token for token, is_own in zip(view.tokens, view.own, strict=True) if is_own]
    assert own == [token for each in drawn for token in each.token_ids]
    assert view.rewards == [0.0, 0.4], "the verifier's: four letters"
    assert view.finish_reason == "stop"


def test_an_environment_of_the_package(options: dict[str, Any], tmp_path: Path) -> None:
    agent = "example_single_tool_call_simple_agent"
    source = write_rows(tmp_path / "rows.jsonl", "abc", agent_ref={"name": agent})
    call = CALL.replace("spell", "get_weather").replace("word", "city")
    says = Says(call, "cold$")
    view, _ = played(
        says, options, open_source(source)[0], name="nemo_gym", limits=LIMITS
    )
    assert "The weather in abc is cold." in "".join(map(chr, view.tokens))
    assert sum(view.rewards) == 1.0


def test_whose_fault_a_failure_is(options: dict[str, Any], tmp_path: Path) -> None:
    def play_row(row: Any, *texts: str, limits: Limits = LIMITS, **more: Any) -> Any:
        return played(
            Says(*texts), {**options, **more}, row, name="nemo_gym", limits=limits
        )[0]

    [fails] = open_source(write_rows(tmp_path / "fails.jsonl", "fail"))
    with pytest.raises(EnvironmentFault, match="'nemo_gym': the agent speller.*500"):
        play_row(fails, "so$")
    view = play_row(fails, "so$", error_reward=-1.0)
    assert view.rewards == [-1.0]
    # The conversation has no room for what the tool answered.
    [row] = open_source(write_rows(tmp_path / "row.jsonl", "abc"))
    full = Limits(max_turns=3, turn_tokens=80, total_tokens=100)
    view = play_row(row, CALL, limits=full)
    assert view.rewards == [0.0] and view.finish_reason == "stop"
    with pytest.raises(ConfigError, match="names the agent 'nobody'.*speller"):
        play_row(row, agent="nobody")
    with pytest.raises(ConfigError, match="the row is of no file of NeMo Gym"):
        play_row({})
    bad = {"where": "bad.jsonl, line 1", "row": {"responses_create_params": {}}}
    bad["row"]["responses_create_params"]["input"] = 3
    with pytest.raises(ConfigError, match="refuses bad.jsonl, line 1.*valid"):
        play_row({COLUMN: bad})


def test_configurations_that_gym_refuses(tmp_path: Path) -> None:
    head = f"http://127.0.0.1:{free_port()}"
    for wrong, said in (
        ({}, "either by config_paths"),
        ({"config_paths": ["a"], "url": head}, "either by config_paths"),
        ({"config_paths": "a"}, "is no list of files"),
        ({"config_paths": ["a"], "python": "/no/python"}, "has no package nemo_gym"),
        ({"config_paths": ["a"], "host": "::1"}, "Leave host and token_env out"),
        ({"url": "localhost:1", "port": 7000}, "write it as http://HOST:PORT"),
        ({"url": head}, "url needs a port"),
        ({"url": head, "outside": True}, "are of the environment 'gateway'"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_options("nemo_gym", wrong)
    [row] = open_source(write_rows(tmp_path / "row.jsonl", "abc"))
    down = {"url": head, "port": free_port()}
    with pytest.raises(EnvironmentFault, match="the head server at .* does not answer"):
        played(Says(), down, row, name="nemo_gym")


def test_a_step_of_grpo_on_two_ranks(
    options: dict[str, Any], ports: Ports, launch: Launcher, tmp_path: Path
) -> None:
    """With servers that run already: they call one address, and the ranks pass calls on to each other."""
    played(
        Says("so$"),
        options,
        open_source(write_rows(tmp_path / "row.jsonl", "abc"))[0],
        name="nemo_gym",
        limits=LIMITS,
    )  # the servers run
    source = write_rows(tmp_path / "rows.jsonl", "abc", "de")
    head = f"http://127.0.0.1:{ports.head}"
    record, taken = take_grpo_step(
        launch,
        tmp_path,
        "nemo_gym",
        f"data.train=['{source}']",
        f"environment.options={{url: '{head}', port: {ports.run}, agent: far_speller}}",
    )
    texts = [sample["response"] for sample in taken]
    rewards = [sample["reward"] for sample in taken]
    assert len(texts) == 8 and rewards == [len(text) / 10 for text in texts]
    assert record["environment/faults"] == 0 and record["actor/grad_norm"] > 0


def test_servers_that_end(options: dict[str, Any], tmp_path: Path) -> None:
    """The last test: it ends the servers of the others."""
    [row] = open_source(write_rows(tmp_path / "row.jsonl", "abc"))
    [servers] = [
        each for each in GymServers._shared.values() if isinstance(each, StartedServers)
    ]

    class Ends(Says):
        def generate(self, *arguments: Any) -> Any:
            servers.process.kill()
            return super().generate(*arguments)

    with pytest.raises(EnvironmentFault, match="speller.*cannot be reached"):
        played(Ends("so$"), options, row, name="nemo_gym", limits=LIMITS)
    assert not servers.is_running
