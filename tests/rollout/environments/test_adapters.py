"""Environments that others have made, with their own packages: tokens in, tokens out, their rewards and their ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megaverl.errors import ConfigError, EpisodeError
from megaverl.processes import ending_with_parent, free_port
from megaverl.rollout.environments import Codec
from megaverl.rollout.environments.environment import Start, check_options, make_game
from tests.rollout.environments.test_episodes import Letters

CODEC = Codec(Letters(), chat=False)
ALONE = "policy"
WORDS = {"left": 0, "down": 1, "right": 2, "up": 3}
LAKE = {"id": "FrozenLake-v1", "actions": WORDS, "make": {"is_slippery": False}}


class Played:
    """An episode: what is said to the model, turn by turn."""

    def __init__(self, name: str, seed: int = 0, **options: Any) -> None:
        check_options(name, options)
        self.game = make_game(name, CODEC, options)
        self.begin = CODEC.decode(self.game.reset(Start([], seed=seed))[ALONE])

    def __call__(self, text: str) -> tuple[str, float, bool]:
        outcome = self.game.step({ALONE: [ord(letter) for letter in text + "$"]})[ALONE]
        return CODEC.decode(outcome.token_ids), outcome.reward, outcome.done


def test_gymnasium_renders_itself_as_text() -> None:
    gymnasium = pytest.importorskip(
        "gymnasium", reason="pip install 'megaverl[text-games]'"
    )
    own = gymnasium.make("FrozenLake-v1", render_mode="ansi", is_slippery=False)
    own.reset(seed=5)
    lake = Played(
        "gymnasium",
        5,
        **LAKE,
        instruction="Reach G.",
        action=r"<a>(.*?)</a>",
        no_action_reward=-0.5,
    )
    assert lake.begin == f"Reach G.\n{own.render().strip()}"
    assert lake("I go right") == ("There was no action in this.", -0.5, False)
    assert lake("<a>west</a>") == (
        "There is no such action; there are: left, down, right, up.",
        -0.5,
        False,
    )
    for word in ("down", "down", "right", "right", "Down"):
        own.step(WORDS[word.lower()])
        assert lake(f"<a>up</a> or rather <a> {word} </a>") == (
            own.render().strip(),
            0.0,
            False,
        )
    assert lake("<a>right</a>") == ("", 1.0, True)
    lake.game.close()
    fallen = Played("gymnasium", **LAKE)
    assert [fallen(word)[2] for word in ("right", "down")] == [False, True], (
        "into the hole"
    )


MODULE = """
import gymnasium

class Echo(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Text(100)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 2
        return f"seed {seed}", {}

    def step(self, action):
        self.left -= 1
        return action[::-1], len(action) / 10, False, self.left == 0, {}

class Numbers(Echo):
    def reset(self, *, seed=None, options=None):
        return 3, {}

gymnasium.register("test/Echo-v0", Echo)
gymnasium.register("test/Numbers-v0", Numbers)
"""


def test_gymnasium_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gymnasium", reason="pip install 'megaverl[text-games]'")
    (tmp_path / "own_gymnasium.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    echo = Played("gymnasium", 7, id="test/Echo-v0", modules=["own_gymnasium"])
    assert echo.begin == "seed 7"
    assert echo(" ab ") == ("ba", 0.2, False)
    assert echo("abc") == ("", 0.3, True)
    with pytest.raises(
        EpisodeError,
        match="test/Numbers-v0 observes int, and does not render itself as text",
    ):
        Played("gymnasium", id="test/Numbers-v0")


def test_textarena() -> None:
    textarena = pytest.importorskip(
        "textarena", reason="./launch/bootstrap.sh environments"
    )
    own = textarena.make("GuessTheNumber-v0")
    own.reset(num_players=1, seed=11)
    game = Played("textarena", 11, id="GuessTheNumber-v0")
    assert game.begin == str(own.get_observation()[1]).strip() != ""
    for guess in range(1, 25):
        done, _ = own.step(f"[{guess}]")
        said = game(f"[{guess}]")
        if done:
            assert said == ("", float(own.close()[0][0]), True)
            break
        assert said == (str(own.get_observation()[1]).strip(), 0.0, False)
    else:
        pytest.fail("the game has no end")


SERVER = """
import sys
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State
from openenv.core.env_server.http_server import HTTPEnvServer
from fastapi import FastAPI

class Say(Action):
    message: str

class Heard(Observation):
    text: str

class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **more):
        self.count = 0
        return Heard(text=f"seed {seed}")

    def step(self, action, timeout_s=None, **more):
        if action.message == "fail":
            raise ValueError("no such thing")
        self.count += 1
        return Heard(text=action.message[::-1], reward=0.5 * self.count, done=self.count == 2)

    @property
    def state(self):
        return State(step_count=self.count)

app = FastAPI()
HTTPEnvServer(Echo, Say, Heard, max_concurrent_envs=4).register_routes(app)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
"""


@pytest.fixture
def openenv(tmp_path: Path) -> Iterator[str]:
    pytest.importorskip("openenv", reason="./launch/bootstrap.sh environments")
    (tmp_path / "server.py").write_text(SERVER)
    port = free_port()
    command = ending_with_parent(
        [sys.executable, str(tmp_path / "server.py"), str(port)]
    )
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        import httpx

        while True:
            assert process.poll() is None, (
                process.stderr.read() if process.stderr else ""
            )
            try:
                httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False)
                break
            except httpx.TransportError:
                continue
        yield f"http://127.0.0.1:{port}"
        process.terminate()


def test_openenv_behind_its_protocol(openenv: str) -> None:
    first = Played("openenv", 3, url=openenv, observation_key="text")
    second = Played("openenv", 4, url=openenv)
    assert first.begin == "seed 3" and '"text": "seed 4"' in second.begin
    assert first("abc") == ("cba", 0.5, False)
    said, reward, done = first("fail")
    assert said.startswith("error: ") and (reward, done) == (0.0, False), (
        "told to the model; the session goes on"
    )
    assert first("xyz") == ("", 1.0, True)
    assert not second("a")[2]
    for played in (first, second):
        played.game.close()
    with pytest.raises(EpisodeError, match=r"openenv.*Closed"):
        second("b")


def test_what_is_missing_or_wrong_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EpisodeError, match="does not answer .* Start its server"):
        Played("openenv", url=f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ConfigError, match="action needs one group"):
        check_options("gymnasium", {"id": "FrozenLake-v1", "action": "a|b"})
    with pytest.raises(ConfigError, match="environment 'textarena' takes"):
        check_options("textarena", {"game": "x"})
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(
        EpisodeError, match=r"needs gymnasium: pip install 'megaverl\[text-games\]'"
    ):
        Played("gymnasium", **LAKE)
