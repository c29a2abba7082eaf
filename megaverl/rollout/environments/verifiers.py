"""verifiers (Prime Intellect): tasks of its tasksets as rows, and its environments as episodes with their own rewards.

A verifiers harness sends messages to the run's gateway, which keeps the tokens that
were drawn. A row names its taskset and the index of its task, and the episode reads the
task from there.
"""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import importlib.util
import itertools
import json
import threading
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from functools import lru_cache
from importlib import metadata
from typing import Any, ClassVar, TypeVar

from megaverl.errors import ConfigError, DataError, EpisodeError
from megaverl.outside import clean
from megaverl.rewards.reasoning_gym import read_task
from megaverl.rollout.environments.conversation import MODEL
from megaverl.rollout.environments.environment import Codec, register_environment
from megaverl.rollout.environments.gateway import ProgramEpisode
from megaverl.user_code import describe, user_code

PREFIX, COLUMN = "verifiers:", "verifiers"
HOW_TO_INSTALL = "pip install 'megaverl[verifiers]'"
HERE = {"type": "subprocess"}  # default runtime of a harness
# Time limits for the start and end of shared tool servers.
SECONDS_TO_BEGIN, SECONDS_TO_END = 300.0, 10.0
T = TypeVar("T")


def read_taskset(path: str) -> tuple[dict[str, Any], int | None]:
    """Parse `verifiers:NAME?OPTION=VALUE&...` into the taskset's configuration and the number of tasks in `size`.

    Raises:
        ValueError: the text does not have this form.
    """
    name, options = read_task(path, PREFIX, r"[\w./@-]+")
    size = options.pop("size", None)
    if size is not None and (not isinstance(size, int) or size < 1):
        raise ValueError(f"expected {PREFIX}{name}?size=NUMBER, found size={size}")
    return {"id": name} | options, size


def why_no_taskset(path: str) -> str:
    """Return why a taskset's name is wrong, or that the package is missing; "" if all is well."""
    if importlib.util.find_spec("verifiers") is None:
        return f"which needs the package verifiers: {HOW_TO_INSTALL}."
    try:
        read_taskset(path)
    except ValueError as error:
        return f"{error}."
    return ""


@lru_cache(maxsize=16)
def tasks_of(path: str) -> list[Any]:
    """List all tasks of a taskset in order; for an endless one, the first `size`.

    Raises:
        ValueError: the package or the taskset is missing, its configuration is wrong, or it is endless and has no size.
    """
    if importlib.util.find_spec("verifiers") is None:
        raise ValueError(f"it needs the package verifiers: {HOW_TO_INSTALL}.")
    import verifiers.v1 as vf
    from verifiers.v1.utils.loaders import load_taskset

    options, size = read_taskset(path)
    try:
        taskset = load_taskset(vf.EnvConfig(taskset=options).taskset)
    except (ImportError, AttributeError, TypeError) as error:
        # verifiers raises these for an unknown name.
        raise ValueError(
            f"verifiers has no taskset {options['id']!r}: {error}"
        ) from None
    if size is None and not taskset.bounded:
        raise ValueError(
            "the taskset has no end; say how many of its tasks are rows: ?size=1000."
        )
    with user_code(
        lambda error: ValueError(f"its tasks cannot be read: {describe(error)}")
    ):
        return list(itertools.islice(taskset, size))


class VerifiersRows:
    """The tasks of a verifiers taskset as rows: `verifiers:NAME?OPTION=VALUE`.

    Raises:
        DataError: see `tasks_of`.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._tasks = tasks_of(path)
        except ValueError as error:
            raise DataError(f"{path}: {error}") from None
        # First and last task, with the package's version: enough to notice that a data
        # set has changed.
        ends = [task.key for task in (*self._tasks[:1], *self._tasks[-1:])]
        known = (path, metadata.version("verifiers"), len(self._tasks), ends)
        self.fingerprint = hashlib.blake2b(
            repr(known).encode(), digest_size=8
        ).hexdigest()

    def __len__(self) -> int:
        return len(self._tasks)

    def where(self, index: int) -> str:
        return f"{self.path}, row {index + 1}"

    def __getitem__(self, index: int) -> dict[str, Any]:
        data = self._tasks[index].data
        prompt = data.prompt
        # A prompt of several messages is sent by the harness itself. The row only shows
        # its text.
        if not isinstance(prompt, str | None):
            prompt = "\n".join(
                str(getattr(message, "content", "")) for message in prompt
            )
        return {
            "prompt": clean(prompt or "")
            or data.description
            or data.name
            or f"task {index + 1}",
            "answer": "",
            COLUMN: {"taskset": self.path, "index": index},
        }


class EnvironmentLoop:
    """A verifiers environment, served by a thread with an event loop for the lifetime of the process."""

    _shared: ClassVar[dict[str, EnvironmentLoop]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, taskset: str, options: Mapping[str, Any]) -> None:
        from verifiers.v1.configs.cli.env import resolve_env_field
        from verifiers.v1.utils.loaders import load_environment

        self.tasks = tasks_of(taskset)
        chosen = {**options.get("taskset", {}), **read_taskset(taskset)[0]}
        fields: dict[str, Any] = {"env": {**options, "taskset": chosen}}
        resolve_env_field(fields)
        config = fields["env"]
        # Harnesses run where the configuration says, and by default in a subprocess.
        for name, spec in config:
            if "runtime" in getattr(
                spec, "model_fields", ()
            ) and "runtime" not in options.get(name, {}):
                setattr(
                    config, name, spec.model_copy(update={"runtime": _runtime_here()})
                )
        self.environment = load_environment(config)
        self._loop = asyncio.new_event_loop()
        # A thread with its own loop, since the caller's thread waits for episodes. It
        # ends with the process.
        threading.Thread(
            target=self._loop.run_forever, name="verifiers", daemon=True
        ).start()
        self._serving = self.environment.serving()
        self._wait(self._serving.__aenter__(), SECONDS_TO_BEGIN)
        atexit.register(self.close)

    @classmethod
    def shared(cls, taskset: str, options: Mapping[str, Any]) -> EnvironmentLoop:
        """Return this process's environment for this taskset and these options, made at the first call."""
        # Environments are shared by equal configurations, since each starts servers.
        key = json.dumps([taskset, options], sort_keys=True)
        with cls._lock:
            if key not in cls._shared:
                cls._shared[key] = cls(taskset, options)
            return cls._shared[key]

    def play(self, index: int, base_url: str, token_env: str | None) -> float:
        """Play one episode of a task with model calls to `base_url`, and return the sum of its agents' rewards.

        Raises:
            EpisodeError: the episode failed.
        """
        from verifiers.v1.clients import EvalClientConfig, ModelContext

        client = EvalClientConfig(
            base_url=base_url, api_key_var=token_env or "NO_TOKEN_IS_ASKED_FOR"
        )
        episode = self._wait(
            self.environment.run_episode(
                self.tasks[index], ModelContext(MODEL, client)
            ),
            None,
        )
        if not episode.ok:
            errors = [
                *episode.errors,
                *(error for trace in episode.traces for error in trace.errors),
            ]
            raise EpisodeError(
                "; ".join(f"{error.type}: {error.message}" for error in errors)
                or "it was not finished"
            )
        return float(sum(trace.reward for trace in episode.traces))

    def close(self) -> None:
        """End its servers. Tasks that do not end in time end with the process."""
        with suppress(TimeoutError):
            self._wait(self._serving.__aexit__(None, None, None), SECONDS_TO_END)
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _wait(self, work: Coroutine[Any, Any, T], seconds: float | None) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(seconds)


def _runtime_here() -> Any:
    from verifiers.v1 import SubprocessConfig

    return SubprocessConfig(**HERE)


@register_environment("verifiers")
class VerifiersEpisode(ProgramEpisode):
    """One episode of a verifiers environment for a row of `data.train: verifiers:NAME`, with the environment's rewards.

    Options:
        environment: fields of verifiers' `env` block beside the taskset: `id` of an environment, agents with their
            harness, runtime (subprocess by default) and limits.
        seconds, error_reward, host, token_env: as for `gateway`.
    """

    def __init__(
        self,
        codec: Codec,
        *,
        environment: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(codec, function=COLUMN, **options)
        self.options, self.token_env = dict(environment or {}), options.get("token_env")

    @staticmethod
    def check(**options: Any) -> None:
        """Raise a ConfigError for options that cannot be used."""
        if importlib.util.find_spec("verifiers") is None:
            raise ConfigError(
                f"environment 'verifiers' needs the package: {HOW_TO_INSTALL}"
            )
        program_options = {
            key: value for key, value in options.items() if key != "environment"
        }
        if program_options.keys() & {"command", "function", "outside"}:
            raise ConfigError(
                "environment 'verifiers': command, function and outside are of the environment 'gateway'"
            )
        ProgramEpisode.check(function="verifiers:play", **program_options)

    def _run_function(self, url: str, row: Mapping[str, Any]) -> Any:
        task = row["extra"].get(COLUMN)
        if task is None:
            raise EpisodeError(
                "the row is of no taskset of verifiers: name one in data.train, verifiers:NAME"
            )
        return EnvironmentLoop.shared(task["taskset"], self.options).play(
            task["index"], url, self.token_env
        )
