"""NeMo Gym (NVIDIA): rows of its JSONL files, and its agent servers as episodes with the rewards of its verifiers.

NeMo Gym runs agents and environments as HTTP servers. The run's gateway takes the place
of its model server:

    episode                    agent server            resources server     gateway of the run
    POST /run (the row)  -->   /seed_session     -->   begin
                               /v1/responses                          -->   metadata names the episode
                               /TOOL             -->   call a tool
                               /verify           -->   reward
    reward               <--   answer of /run

The package needs Python 3.12 and versions of its own, so its servers run in a process
with their own interpreter (`nemo_gym_servers.py`), or elsewhere under a head server.
"""

from __future__ import annotations

import hashlib
import json
import socket
import sys
import threading
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, ClassVar
from urllib.parse import urlsplit

import yaml

from megaverl.errors import ConfigError, DataError, EnvironmentFault, EpisodeError
from megaverl.outside import clean, read_json, read_number
from megaverl.rollout.environments.environment import (
    Codec,
    Start,
    register_environment,
)
from megaverl.rollout.environments.gateway import EPISODE, SHOWN, ProgramEpisode
from megaverl.rollout.environments.package_process import (
    PackageProcess,
    has_package,
    script,
)
from megaverl.user_code import describe

PREFIX, COLUMN = "nemo_gym:", "nemo_gym"
HEAD_SECONDS = 30.0  # longest wait for the head server's configuration
LOOPBACK = "127.0.0.1"
UNPROCESSABLE = 422  # status of a request that does not fit an agent's schema


def why_no_rows(path: str) -> str:
    """Return why a source `nemo_gym:FILE` cannot be read; "" if the file is there."""
    file = Path(path.removeprefix(PREFIX))
    return "" if file.is_file() else f"and there is no file {file}."


class GymRows:
    """Rows of a JSONL file of NeMo Gym: `nemo_gym:FILE`.

    Raises:
        DataError: names the file and the line that cannot be used.
    """

    def __init__(self, path: str) -> None:
        file = Path(path.removeprefix(PREFIX))
        self.path = path
        try:
            content = file.read_bytes()
        except OSError as error:
            raise DataError(f"{path}: {file} cannot be read: {error}") from error
        lines = content.decode("utf-8", errors="replace").splitlines()
        self._rows = [
            self._read(line, number)
            for number, line in enumerate(lines, 1)
            if line.strip()
        ]
        self.fingerprint = hashlib.blake2b(content, digest_size=8).hexdigest()

    def _read(self, line: str, number: int) -> dict[str, Any]:
        where = f"{self.path}, line {number}"
        try:
            row = read_json(line)
        except ValueError as error:
            raise DataError(f"{where} is no JSON: {error}") from None
        parameters = (
            row.get("responses_create_params") if isinstance(row, dict) else None
        )
        if not isinstance(parameters, dict) or "input" not in parameters:
            raise DataError(
                f"{where} has no responses_create_params with an input. Prepare it as NeMo Gym's data sets are."
            )
        return {"where": where, "row": row}

    def __len__(self) -> int:
        return len(self._rows)

    def where(self, index: int) -> str:
        return str(self._rows[index]["where"])

    def __getitem__(self, index: int) -> dict[str, Any]:
        parameters = self._rows[index]["row"]["responses_create_params"]
        prompt = _last_message(parameters["input"]) or f"row {index + 1}"
        return {"prompt": clean(prompt), "answer": "", COLUMN: self._rows[index]}


def _last_message(request_input: Any) -> str:
    """Return the text of the last message of the user, which stands for a row in logs."""
    if isinstance(request_input, str):
        return request_input
    texts = [
        _text(item.get("content"))
        for item in request_input
        if isinstance(item, dict) and item.get("role") == "user"
    ]
    return texts[-1] if texts else ""


def _text(content: Any) -> str:
    if isinstance(content, list):
        parts = [part.get("text", "") for part in content if isinstance(part, dict)]
        return "".join(map(str, parts))
    return str(content or "")


class GymServers:
    """Addresses of agent servers, by name.

    Attributes:
        agents: name of an agent -> its base URL.
    """

    _shared: ClassVar[dict[str, GymServers]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, agents: Mapping[str, str]) -> None:
        self.agents = agents
        self._is_lost = False

    @classmethod
    def shared(cls, options: Mapping[str, Any], policy: tuple[str, int]) -> GymServers:
        """Return this process's servers for these options. Start them, or ask the head server, at the first call.

        Servers that have ended are started again, and those that cannot be reached are looked for again.

        Args:
            policy: host and port of the gateway.

        Raises:
            ConfigError: NeMo Gym refuses the configuration.
            EnvironmentFault: the head server does not answer, or the servers do not start in time.
        """
        key = json.dumps([options, policy], sort_keys=True)
        with cls._lock:
            servers = cls._shared.get(key)
            if servers is None or not servers.is_running:
                url = options["url"]
                servers = (
                    StartedServers(options, policy)
                    if url is None
                    else cls(_agents_of_head(url))
                )
                cls._shared[key] = servers
            return servers

    @property
    def is_running(self) -> bool:
        """False once the servers are known to have ended, or may have moved."""
        return not self._is_lost

    def lose(self) -> None:
        """Record that a server could not be reached, so that the head server is asked again."""
        self._is_lost = True


class StartedServers(GymServers):
    """Agent and resources servers in a process of this rank, which ends with it.

    Raises:
        ConfigError: NeMo Gym refuses the configuration.
        EnvironmentFault: the servers do not start in time.
    """

    def __init__(self, options: Mapping[str, Any], policy: tuple[str, int]) -> None:
        super().__init__({})
        answers: SimpleQueue[Any] = SimpleQueue()
        python = options["python"] or sys.executable
        self.process = PackageProcess(
            [python, "-P", script("nemo_gym_servers.py")], answers.put
        )
        self.process.send(
            {
                "config_paths": options["config_paths"],
                "overrides": options["overrides"],
                "model_server": options["model_server"],
                "host": policy[0],
                "port": policy[1],
            }
        )
        seconds = options["start_seconds"]
        try:
            answer = answers.get(timeout=seconds)
        except Empty:
            self.process.kill()
            raise EnvironmentFault(
                f"environment 'nemo_gym': its servers did not start within start_seconds={seconds:g} s."
                f"{self.process.last_words()}"
            ) from None
        if answer is None:
            raise EnvironmentFault(
                f"environment 'nemo_gym': its servers have ended while they started.{self.process.last_words()}"
            )
        if "mistake" in answer:
            raise ConfigError(
                f"environment 'nemo_gym': NeMo Gym refuses environment.options: {answer['mistake']}"
            )
        self.agents = answer["agents"]

    @property
    def is_running(self) -> bool:
        return self.process.is_running


def _agents_of_head(url: str) -> dict[str, str]:
    """Return the agents of running servers, from their head server's configuration.

    Raises:
        EnvironmentFault: the head server does not answer.
    """
    address = f"{url.rstrip('/')}/global_config_dict_yaml"
    try:
        with urllib.request.urlopen(address, timeout=HEAD_SECONDS) as response:
            config = yaml.safe_load(read_json(response.read()))
    except (OSError, HTTPException, ValueError, yaml.YAMLError) as error:
        raise EnvironmentFault(
            f"environment 'nemo_gym': the head server at {url} does not answer: {describe(error)}"
        ) from error
    agents = {}
    for name, instance in config.items() if isinstance(config, dict) else ():
        kinds = (
            instance.get("responses_api_agents") if isinstance(instance, dict) else None
        )
        for server in kinds.values() if isinstance(kinds, dict) else ():
            agents[str(name)] = f"http://{server['host']}:{server['port']}"
    return agents


@register_environment("nemo_gym")
class GymEpisode(ProgramEpisode):
    """One episode of an agent server of NeMo Gym, for a row of `data.train: nemo_gym:FILE`.

    Options:
        config_paths: NeMo Gym's YAML files of agents and resources servers, which each rank starts for itself. They
            name no model server: the gateway is `policy_model`.
        overrides: further values of that configuration.
        python: interpreter that has nemo-gym and what these servers import. None: the run's own.
        start_seconds: longest time until the servers answer.
        url: instead of these, the head server of a running NeMo Gym, whose model server calls the gateway at
            http://HOST:`port`/v1.
        agent: name of the agent that plays rows without `agent_ref`.
        model_server: name of the model server in the configuration.
        seconds, error_reward, host, port, token_env, train_models: as for `gateway`.
    """

    kind: ClassVar[str] = "nemo_gym"

    def __init__(
        self,
        codec: Codec,
        *,
        config_paths: Sequence[str] = (),
        overrides: Mapping[str, Any] | None = None,
        python: str | None = None,
        start_seconds: float = 300.0,
        url: str | None = None,
        agent: str | None = None,
        model_server: str = "policy_model",
        **options: Any,
    ) -> None:
        super().__init__(codec, function=COLUMN, **options)
        self.agent = agent
        self._options = {
            "config_paths": list(config_paths),
            "overrides": dict(overrides or {}),
            "python": python,
            "start_seconds": start_seconds,
            "url": url,
            "model_server": model_server,
        }
        self._name_of_agent = agent or ""
        self._connection: HTTPConnection | None = None
        self._servers: GymServers | None = None
        self._address = ""

    @staticmethod
    def check(**options: Any) -> None:
        """Raise a ConfigError for options that cannot be used."""
        own = {
            key: options.pop(key, None)
            for key in ("config_paths", "overrides", "python", "start_seconds", "url", "agent", "model_server")
        }  # fmt: skip
        if options.keys() & {"command", "function", "outside"}:
            raise ConfigError(
                "environment 'nemo_gym': command, function and outside are of the environment 'gateway'"
            )
        paths, url = own["config_paths"], own["url"]
        if bool(paths) == (url is not None):
            raise ConfigError(
                "environment 'nemo_gym': name its servers, either by config_paths, which are started, or by the url "
                "of a head server that is running"
            )
        ProgramEpisode.check(function="nemo_gym:play", **options)
        if url is not None:
            if urlsplit(str(url)).scheme != "http":
                raise ConfigError(
                    f"environment 'nemo_gym': url={url!r}; write it as http://HOST:PORT"
                )
            if not options.get("port"):
                raise ConfigError(
                    "environment 'nemo_gym': url needs a port: the model server of a running NeMo Gym calls the "
                    "policy there"
                )
            return
        if not isinstance(paths, list) or {*map(type, paths)} != {str}:
            raise ConfigError(
                f"environment 'nemo_gym': config_paths={paths!r} is no list of files"
            )
        if options.get("token_env") or options.get("host", LOOPBACK) != LOOPBACK:
            raise ConfigError(
                "environment 'nemo_gym': servers that are started by config_paths call the policy on the loopback, "
                "without a token. Leave host and token_env out"
            )
        python = own["python"] or sys.executable
        if not has_package(python, "nemo_gym"):
            raise ConfigError(
                f"environment 'nemo_gym': {python} has no package nemo_gym. It needs Python 3.12: install nemo-gym "
                "there, in an environment of its own, and set environment.options.python to its interpreter"
            )

    def reset(self, start: Start) -> Sequence[int]:
        """Find the row's agent, let it run, and wait for its first call."""
        column = start.extra.get(COLUMN)
        if not isinstance(column, Mapping):
            raise ConfigError(
                "environment 'nemo_gym': the row is of no file of NeMo Gym. Name one in data.train, nemo_gym:FILE"
            )
        reference = column["row"].get("agent_ref") or {}
        name = str(reference.get("name") or self.agent or "")
        servers = self._servers = GymServers.shared(
            self._options, (self.server.host, self.server.server_address[1])
        )
        if name not in servers.agents:
            raise ConfigError(
                f"environment 'nemo_gym': {column['where']} names the agent {name!r} (agent_ref, or "
                f"environment.options.agent); there are: {', '.join(sorted(servers.agents)) or 'none'}"
            )
        self._name_of_agent, self._address = name, servers.agents[name]
        return super().reset(start)

    @property
    def _name(self) -> str:
        return f"the agent {self._name_of_agent}"

    def _run_function(self, url: str, row: Mapping[str, Any]) -> Any:
        """Post the row to the agent and return the reward of its answer.

        Raises:
            EpisodeError: the agent cannot be reached, or fails.
            ConfigError: the agent refuses the row.
        """
        where, gym_row = row["extra"][COLUMN]["where"], row["extra"][COLUMN]["row"]
        parameters = gym_row["responses_create_params"]
        metadata = dict(parameters.get("metadata") or {})
        metadata[EPISODE] = self.server.label(self.session)
        body = {
            **gym_row,
            "responses_create_params": {**parameters, "metadata": metadata},
        }
        parts = urlsplit(self._address)
        connection = HTTPConnection(parts.hostname or LOOPBACK, parts.port)
        self._connection = connection
        try:
            connection.request(
                "POST",
                f"{parts.path}/run",
                json.dumps(body),
                {"Content-Type": "application/json"},
            )
            response = connection.getresponse()
            text = response.read()
        except (OSError, HTTPException) as error:
            if self._servers is not None:
                self._servers.lose()
            raise EpisodeError(
                f"the agent at {self._address} cannot be reached: {describe(error)}"
            ) from error
        finally:
            connection.close()
        shown = clean(text.decode("utf-8", errors="replace")).strip()[:SHOWN]
        if response.status == UNPROCESSABLE:
            raise ConfigError(
                f"environment 'nemo_gym': the agent {self._name_of_agent} refuses {where}: {shown}"
            )
        if response.status != 200:
            raise EpisodeError(f"/run answered {response.status}: {shown}")
        try:
            return read_number(read_json(text)["reward"])
        except (ValueError, KeyError, TypeError) as error:
            raise EpisodeError(
                f"the answer of /run has no reward ({describe(error)}): {shown}"
            ) from error

    def close(self) -> None:
        """End the episode, even if the agent has not finished."""
        super().close()
        # The thread that waits for the agent's answer ends with its connection.
        connection = self._connection
        if connection is not None and connection.sock is not None:
            with suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)
