"""Harbor: folders of tasks as rows, and its trials as episodes with the rewards of the tasks' verifiers.

A task is an instruction, an environment for commands, and tests that write a reward.
Harbor runs it: it starts the environment, lets an agent work in it, and runs the tests.

    episode              process of Harbor                              gateway of the run
    a trial       -->    start the environment, for example a container
                         the agent asks the policy                 -->  answers it
                         run the tests, read /logs/verifier/reward.txt
    reward        <--    result of the trial

The package needs Python 3.12 and versions of its own, so trials run in a process with
their own interpreter (`harbor_worker.py`).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import sys
import tempfile
import threading
import tomllib
from collections.abc import Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar

from megaverl.errors import ConfigError, DataError, EpisodeError
from megaverl.outside import clean, read_number
from megaverl.rewards.sandbox import machine
from megaverl.rollout.environments.conversation import MODEL
from megaverl.rollout.environments.environment import Codec, register_environment
from megaverl.rollout.environments.gateway import NO_TOKEN, SHOWN, ProgramEpisode
from megaverl.rollout.environments.package_process import (
    PackageProcess,
    has_package,
    script,
)

PREFIX, COLUMN = "harbor:", "harbor"
TASK, INSTRUCTION = "task.toml", "instruction.md"
# Key of a reward that tests write as a plain number.
REWARD = "reward"
# Harbor reports its use over the network, and LiteLLM fetches prices, unless they are
# told not to.
QUIET = {"HARBOR_TELEMETRY": "0", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
OWN_OPTIONS = (
    "agent",
    "agent_options",
    "environment",
    "environment_options",
    "trial",
    "reward",
    "folder",
    "python",
)


def why_no_tasks(path: str) -> str:
    """Return why a source `harbor:FOLDER` cannot be read; "" if the folder is there."""
    folder = Path(path.removeprefix(PREFIX))
    return "" if folder.is_dir() else f"and there is no folder {folder}."


class HarborRows:
    """Tasks of a folder as rows: `harbor:FOLDER`, which is a task or has tasks in it, at any depth.

    Raises:
        DataError: names the file of a task that is missing or wrong.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        folder = Path(path.removeprefix(PREFIX)).resolve()
        files = sorted(folder.rglob(TASK)) if folder.is_dir() else []
        if not files:
            raise DataError(
                f"{path}: no task of Harbor is there: {folder} has no {TASK} in it"
            )
        self._tasks = [_read_task(file.parent) for file in files]
        content = json.dumps([files[0].name, *self._tasks], sort_keys=True, default=str)
        self.fingerprint = hashlib.blake2b(content.encode(), digest_size=8).hexdigest()

    def __len__(self) -> int:
        return len(self._tasks)

    def where(self, index: int) -> str:
        return str(self._tasks[index]["path"])

    def __getitem__(self, index: int) -> dict[str, Any]:
        task = self._tasks[index]
        return {
            "prompt": clean(task["instruction"]) or Path(task["path"]).name,
            "answer": "",
            COLUMN: {"path": task["path"]},
        }


def _read_task(folder: Path) -> dict[str, str]:
    """Return the path, the instruction and the configuration of a task.

    Raises:
        DataError: a file is missing, or cannot be read.
    """
    try:
        config = (folder / TASK).read_text(encoding="utf-8")
        parsed = tomllib.loads(config)
        instruction = folder / INSTRUCTION
        # A task of several steps has an instruction for each of them.
        has_steps = bool(parsed.get("steps")) and not instruction.exists()
        text = "" if has_steps else instruction.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DataError(
            f"{folder} is no task of Harbor that can be read: {error}"
        ) from error
    has_image = bool(parsed.get("environment", {}).get("docker_image"))
    if not has_image and not (folder / "environment").is_dir():
        raise DataError(
            f"{folder} is no task of Harbor: it has no folder environment, and {TASK} no docker_image"
        )
    return {"path": str(folder), "instruction": text.strip(), "config": config}


class TrialRunner:
    """Process of Harbor, which this process shares among all its episodes.

    Args:
        python: interpreter that has harbor.
    """

    _shared: ClassVar[dict[str, TrialRunner]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, python: str) -> None:
        self._numbers = itertools.count()
        self._waiting: dict[int, SimpleQueue[dict[str, Any] | None]] = {}
        self.process = PackageProcess(
            [python, "-P", script("harbor_worker.py")],
            self._take,
            QUIET | os.environ,
        )
        command = [sys.executable, "-sSP", os.path.abspath(machine.__file__)]
        self.process.send({"machine": command})

    @classmethod
    def shared(cls, python: str) -> TrialRunner:
        """Return this process's runner for an interpreter. One that has ended is started again."""
        with cls._lock:
            runner = cls._shared.get(python)
            if runner is None or not runner.process.is_running:
                runner = cls._shared[python] = cls(python)
            return runner

    def _take(self, answer: Any) -> None:
        if answer is not None:
            if (waiting := self._waiting.get(answer["id"])) is not None:
                waiting.put(answer)
            return
        for waiting in list(self._waiting.values()):
            waiting.put(None)

    def begin(self) -> int:
        """Return the number of a new trial."""
        number = next(self._numbers)
        self._waiting[number] = SimpleQueue()
        return number

    def run(
        self, number: int, trial: Mapping[str, Any], base_url: str
    ) -> dict[str, Any]:
        """Run a trial whose agent asks the policy at `base_url`, and return its answer. See `harbor_worker.py`.

        Raises:
            EpisodeError: the process has ended, or the trial was cancelled.
        """
        self.process.send({"id": number, "base_url": base_url, "trial": dict(trial)})
        # The process may have ended before this trial waited for it.
        if not self.process.is_running:
            self._waiting[number].put(None)
        answer = self._waiting[number].get()
        self._waiting.pop(number, None)
        if answer is None:
            raise EpisodeError(
                f"the process of Harbor has ended.{self.process.last_words()}"
            )
        return answer

    def cancel(self, number: int) -> None:
        """End a trial that is still running; its environment is stopped."""
        if (waiting := self._waiting.get(number)) is not None:
            self.process.send({"id": number, "cancel": True})
            waiting.put(None)


@register_environment("harbor")
class HarborEpisode(ProgramEpisode):
    """One trial of Harbor, for a task of `data.train: harbor:FOLDER`.

    Options:
        agent: agent of Harbor by name, such as terminus-2, or `module:Class`.
        agent_options: the agent's keyword arguments.
        environment: where commands run: docker, daytona or another environment of Harbor, `module:Class`, or
            namespaces, which needs no container engine but takes this machine's programs instead of an image.
        environment_options: the environment's keyword arguments.
        trial: further fields of Harbor's TrialConfig, such as timeout_multiplier.
        reward: name of the reward, if tests write several. None: `reward`, or the only one.
        folder: where trials keep their logs. None: a temporary folder, which is removed with the episode.
        python: interpreter that has harbor and what the agent and the environment import. None: the run's own.
        seconds, error_reward, host, port, token_env, train_models: as for `gateway`.
    """

    kind: ClassVar[str] = "harbor"

    def __init__(
        self,
        codec: Codec,
        *,
        agent: str = "terminus-2",
        agent_options: Mapping[str, Any] | None = None,
        environment: str = "docker",
        environment_options: Mapping[str, Any] | None = None,
        trial: Mapping[str, Any] | None = None,
        reward: str | None = None,
        folder: str | None = None,
        python: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(codec, function=COLUMN, **options)
        self.agent, self.agent_options = agent, dict(agent_options or {})
        self.environment = environment
        self.environment_options = dict(environment_options or {})
        self.trial, self.reward, self.folder = dict(trial or {}), reward, folder
        self.python = python or sys.executable
        self._running: tuple[TrialRunner, int] | None = None

    @staticmethod
    def check(**options: Any) -> None:
        """Raise a ConfigError for options that cannot be used."""
        own = {key: options.pop(key, None) for key in OWN_OPTIONS}
        if options.keys() & {"command", "function", "outside"}:
            raise ConfigError(
                "environment 'harbor': command, function and outside are of the environment 'gateway'"
            )
        ProgramEpisode.check(function="harbor:play", **options)
        for name in ("agent_options", "environment_options", "trial"):
            if own[name] is not None and not isinstance(own[name], dict):
                raise ConfigError(
                    f"environment 'harbor': {name}={own[name]!r} is no mapping"
                )
        taken = {"task", "agent", "environment", "trials_dir"} & (
            own["trial"] or {}
        ).keys()
        if taken:
            raise ConfigError(
                f"environment 'harbor': trial sets {', '.join(sorted(taken))}, which the other options and the rows "
                "set"
            )
        python = own["python"] or sys.executable
        if not has_package(python, "harbor"):
            raise ConfigError(
                f"environment 'harbor': {python} has no package harbor. It needs Python 3.12: install harbor there, in "
                "an environment of its own, and set environment.options.python to its interpreter"
            )

    @property
    def _name(self) -> str:
        return f"the trial of {self.agent}"

    def _run_function(self, url: str, row: Mapping[str, Any]) -> Any:
        """Run the row's trial and return its reward.

        Raises:
            EpisodeError: the trial has no reward, through no fault of the policy.
            ConfigError: the task or an option is wrong.
        """
        column = row["extra"].get(COLUMN)
        if not isinstance(column, Mapping):
            raise ConfigError(
                "environment 'harbor': the row is no task of Harbor. Name a folder of them in data.train, "
                "harbor:FOLDER"
            )
        runner = TrialRunner.shared(self.python)
        number = runner.begin()
        self._running = (runner, number)
        folder = self.folder or tempfile.mkdtemp(prefix="megaverl-harbor-")
        try:
            answer = runner.run(number, self._fields(column["path"], url, folder), url)
        finally:
            if self.folder is None:
                shutil.rmtree(folder, ignore_errors=True)
        if "mistake" in answer:
            raise ConfigError(
                f"environment 'harbor', task {column['path']}: {clean(answer['mistake'])}"
            )
        failures = "; ".join(
            f"{each['type']}: {each['message']}" for each in answer.get("failures", ())
        )
        if not answer.get("valid"):
            reason = answer.get("fault") or failures or "its tests wrote no reward"
            raise EpisodeError(f"task {column['path']}: {clean(reason)[:SHOWN]}")
        return self._reward_of(answer["rewards"], column["path"])

    def _fields(self, path: str, url: str, folder: str) -> dict[str, Any]:
        """Return the fields of the trial's configuration."""
        token = self.token or NO_TOKEN
        agent = {
            ("import_path" if ":" in self.agent else "name"): self.agent,
            "model_name": f"openai/{MODEL}",
            "kwargs": self.agent_options,
            "env": {
                "OPENAI_BASE_URL": url,
                "OPENAI_API_KEY": token,
                # Anthropic's clients append /v1 themselves.
                "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
                "ANTHROPIC_API_KEY": token,
            },
        }
        environment = {
            ("import_path" if ":" in self.environment else "type"): self.environment,
            "kwargs": self.environment_options,
        }
        return {
            "task": {"path": path},
            "trials_dir": folder,
            "agent": agent,
            "environment": environment,
            **self.trial,
        }

    def _reward_of(self, rewards: Mapping[str, Any], path: str) -> float:
        """Return the reward that the options choose.

        Raises:
            ConfigError: the task has several, and none of that name.
        """
        name = self.reward or (
            REWARD if REWARD in rewards or len(rewards) != 1 else next(iter(rewards))
        )
        if name not in rewards:
            raise ConfigError(
                f"environment 'harbor', task {path}: there is no reward {name!r} among {', '.join(sorted(rewards))}. "
                "Choose one with environment.options.reward"
            )
        return read_number(rewards[name])

    def close(self) -> None:
        """End the episode; a trial that still runs is stopped."""
        super().close()
        if self._running is not None:
            runner, number = self._running
            runner.cancel(number)
