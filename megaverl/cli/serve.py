"""Commands about servers: `megaverl serve` starts a server, `megaverl rollout-pool` changes the servers of a run.

A server generates for runs, holds a reward or judge model that several jobs share, or
trains adapters for clients of Tinker's API. The first two are vLLM's. `rollout-pool`
adds and removes generating servers while the run goes on.
"""

from __future__ import annotations

import argparse
import hmac
import json
import os
import shlex
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from megaverl.cli.options import (
    Subcommand,
    UsageError,
    add_dry_run,
    add_json,
    add_nproc,
)
from megaverl.config import RolloutConfig
from megaverl.errors import FAILED, MegaverlError
from megaverl.gpus import count_gpus
from megaverl.outside import read_json_file
from megaverl.rewards.service import JOB_HEADER
from megaverl.rollout.server_api import RECEIVER, is_loopback, url_problem
from megaverl.rollout.serving import (
    MODULE,
    check_start,
    default_arguments,
    watch_server,
)

# Environment variables through which the command configures the middleware in its
# server's process.
PER_JOB = "MEGAVERL_PER_JOB"
TOKEN = "VLLM_API_KEY"

# Default port for each kind of server.
PORTS = {"rollout": 8000, "reward": 8001}
# A server that generates for a run gets new weights while it runs, and takes and
# returns token ids.
ROLLOUT_ARGUMENTS = (
    "--enable-scale-out",
    *("--generation-config", "vllm"),
    *("--logprobs-mode", "processed_logprobs"),
)
EXTENSION = "--worker-extension-cls"
# The server that is no vLLM server: it takes a configuration in place of a model.
TINKER = "tinker"
SERVE = """\
Start a server: vLLM's for rollout and reward, this project's for tinker.

rollout: a server for runs with rollout.engine=server. It generates responses and receives the runs' weights.

  megaverl serve rollout MODEL --port 8000
  megaverl train ... rollout.engine=server 'rollout.servers.urls=["http://127.0.0.1:8000"]'

reward: a model that several jobs share: a sequence classifier with one label, whose output is the reward, or with
--judge a language model.

  megaverl serve reward runs/rm/hf --port 8001
  megaverl train ... 'reward={url: "http://127.0.0.1:8001", model: runs/rm/hf}'

  REWARD_TOKEN=... megaverl serve reward my/judge --judge --host 10.0.0.5 --token-env REWARD_TOKEN
  megaverl train ... 'reward={judge: {url: "http://10.0.0.5:8001/v1", model: my/judge, token_env: REWARD_TOKEN}}'

tinker: a server with Tinker's API, on which clients train LoRA adapters of one model side by side. It takes a
configuration and key=value like `megaverl train`; section tinker has its interface, port and API key.

  megaverl serve tinker server.yaml model.path=DIR 'actor.lora={rank: 32}' tinker.port=8002
  TINKER_BASE_URL=http://127.0.0.1:8002 TINKER_API_KEY=tml-any python my_recipe.py

vLLM's server listens on the interface of --host; other than the loopback it needs a token. It uses a part of the memory
that is free when it starts. --vllm='--max-model-len 4096' passes arguments to `vllm serve`, which override megaverl's
defaults. Ctrl-C or SIGTERM ends the server.
"""


def _serve_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=(*PORTS, TINKER))
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="Hugging Face folder, or org/name; also its name in requests. tinker: YAML file of the configuration",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="tinker: override a key of the file",
    )
    add_nproc(parser, "tinker: processes to start on this machine (run.nproc)")
    add_dry_run(parser)
    parser.add_argument(
        "--judge",
        action="store_true",
        help="reward: serve a language model with chat/completions",
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address of the interface (127.0.0.1)"
    )
    parser.add_argument("--port", type=int, help="8000 for rollout, 8001 for reward")
    parser.add_argument(
        "--token-env",
        metavar="NAME",
        help="environment variable with the token that jobs must send",
    )
    parser.add_argument(
        "--per-job",
        type=int,
        default=64,
        metavar="N",
        help="reward: concurrent requests of one job (64)",
    )
    parser.add_argument(
        "--log",
        type=Path,
        metavar="FILE",
        help="file for vLLM's output (runs/serve/NAME_PORT.log)",
    )
    parser.add_argument(
        "--vllm",
        default="",
        metavar="ARGUMENTS",
        help="further arguments of vllm serve, as one text",
    )


# vLLM needs a tokenizer for a model that takes images. Pixels arrive normalised, and
# are not kept: requests bring them.
IMAGE_ARGUMENTS = (
    "--no-mm-device-do-normalize",
    *("--limit-mm-per-prompt", '{"video": 0}'),
    *("--mm-processor-cache-gb", "0"),
)


def model_arguments(model: str) -> list[str]:
    """Return the arguments of vLLM that a rollout server of this model needs, beside those of every such server.

    Args:
        model: a Hugging Face folder. A model on a hub is taken for one without images, as its config.json is not here.
    """
    config = Path(model, "config.json")
    if not (config.is_file() and "vision_config" in read_json_file(config)):
        return ["--skip-tokenizer-init"]
    # vLLM does not measure memory on a CPU.
    return [*IMAGE_ARGUMENTS, *([] if count_gpus() else ["--skip-mm-profiling"])]


def server_command(
    arguments: argparse.Namespace, environment: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Build the command line of `vllm`, and the environment variables that it needs.

    Args:
        environment: variables of this process, among them the one that holds the token.

    Raises:
        UsageError: the interface would be open to others without a token, or is not a single interface.
    """
    port = arguments.port or PORTS[arguments.what]
    host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
    # These names stand for all interfaces at once, public ones included.
    if arguments.host in ("", "0.0.0.0", "::", "[::]"):
        raise UsageError(
            f"--host {arguments.host or repr('')}: name one interface by its address"
        )
    if arguments.token_env is None and not is_loopback(f"http://{host}:{port}"):
        raise UsageError(
            f"--host {arguments.host} is not the loopback: name a variable with a token (--token-env)"
        )
    if arguments.per_job < 1:
        raise UsageError(f"--per-job {arguments.per_job}: at least 1")
    is_rollout = arguments.what == "rollout"
    if is_rollout and arguments.judge:
        raise UsageError("--judge is an option of `megaverl serve reward`")
    variables = (
        {"VLLM_SERVER_DEV_MODE": "1"}
        if is_rollout
        else {PER_JOB: str(arguments.per_job)}
    )
    if arguments.token_env is not None:
        if not environment.get(arguments.token_env):
            raise UsageError(f"--token-env: no variable {arguments.token_env} is set")
        # Arguments of a process can be read by every user of the machine, its
        # environment cannot.
        variables[TOKEN] = environment[arguments.token_env]
    vllm_arguments = shlex.split(arguments.vllm)
    if is_rollout:
        kind = [*ROLLOUT_ARGUMENTS, *model_arguments(arguments.model)]
        # Its workers can then receive weights from an actor's ranks
        # (rollout.servers.transfer: direct).
        if not any(word.partition("=")[0] == EXTENSION for word in vllm_arguments):
            kind += [EXTENSION, RECEIVER]
    elif arguments.judge:
        kind = []
    else:
        kind = ["--runner", "pooling", "--convert", "classify"]
    address = ["--host", arguments.host, "--port", str(port)]
    guard = TokenGuard if is_rollout else JobQueues
    defaults = default_arguments(arguments.model, vllm_arguments)
    middleware = ["--middleware", f"{__name__}.{guard.__name__}"]
    return [
        "serve",
        arguments.model,
        *kind,
        *address,
        *middleware,
        *defaults,
        *vllm_arguments,
    ], variables


def _serve_tinker(arguments: argparse.Namespace) -> int:
    """Check the configuration, then run the server's ranks, or this process's rank under torchrun."""
    # Imported here, because vLLM's servers need no torch in this process.
    from megaverl.cli.train import run_command

    arguments.config = arguments.model
    return run_command("tinker", arguments, apply=None, words=("serve",))


def _serve(arguments: argparse.Namespace) -> int:
    """Start a server, and wait until it ends."""
    if arguments.what == TINKER:
        return _serve_tinker(arguments)
    if arguments.overrides or arguments.nproc or arguments.dry_run:
        raise UsageError(
            f"key=value, --nproc and --dry-run are options of `megaverl serve {TINKER}`"
        )
    command, variables = server_command(arguments, os.environ)
    service = arguments.what
    host = arguments.host
    port = arguments.port or PORTS[arguments.what]
    check_start(arguments.model, host, port)
    log = arguments.log or Path("runs", "serve", f"{service}_{port}.log")
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def tell() -> None:
        print(f"serving {arguments.model} at {url} (Ctrl-C ends it)", flush=True)
        if service == "rollout":
            print(
                f"to add it to a run: megaverl rollout-pool add RUN {url}", flush=True
            )

    print(f"starting vLLM's server; its log: {log}", flush=True)
    return watch_server(
        [sys.executable, "-m", MODULE, *command],
        {**os.environ, **variables},
        log,
        host,
        port,
        tell,
    )


# An ASGI application's function that sends one message to the client.
Send = Callable[[dict[str, Any]], Awaitable[None]]


class TokenGuard:
    """ASGI middleware that requires the token on every path but /health.

    vLLM's own check covers only /v1 and /inference. Other paths (/classify, and those
    that change weights) would be open.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app
        self.token = os.environ.get(TOKEN)

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Send) -> None:
        """Pass on a request that has the token, and refuse others with 401."""
        if scope["type"] == "lifespan" or scope["path"] == "/health":
            return await self.app(scope, receive, send)
        headers = {name.lower(): value for name, value in scope["headers"]}
        # `compare_digest` takes the same time for every token, so a wrong one cannot be
        # guessed byte by byte.
        wanted = f"Bearer {self.token}".encode()
        if self.token is not None and not hmac.compare_digest(
            headers.get(b"authorization", b""), wanted
        ):
            return await self._refuse(scope, send, 401, "another token is wanted")
        await self.pass_on(scope, headers, receive, send)

    async def pass_on(
        self,
        scope: dict[str, Any],
        headers: Mapping[bytes, bytes],
        receive: Any,
        send: Send,
    ) -> None:
        """Pass a request that has the token to the application."""
        await self.app(scope, receive, send)

    @staticmethod
    async def _refuse(
        scope: Mapping[str, Any], send: Send, status: int, message: str
    ) -> None:
        """Answer a request with an error in the form of the OpenAI API, or close its websocket."""
        if scope["type"] == "websocket":
            return await send(
                {"type": "websocket.close", "code": 1008, "reason": message}
            )
        headers = [(b"content-type", b"application/json"), (b"retry-after", b"1")]
        await send(
            {"type": "http.response.start", "status": status, "headers": headers}
        )
        await send(
            {
                "type": "http.response.body",
                "body": json.dumps({"error": {"message": message}}).encode(),
            }
        )


class JobQueues(TokenGuard):
    """Middleware that also limits how many requests of one job run at the same time.

    Requests name their job in a header; without it, the client's address stands for the
    job. A request beyond the limit is answered with status 429, and the job tries again
    later.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        super().__init__(app)
        self.most = int(os.environ[PER_JOB])
        self.running: Counter[str] = Counter()

    async def pass_on(
        self,
        scope: dict[str, Any],
        headers: Mapping[bytes, bytes],
        receive: Any,
        send: Send,
    ) -> None:
        """Pass a request to the application, or refuse it if its job has too many."""
        client = scope.get("client") or ("",)
        job = headers.get(JOB_HEADER.lower().encode(), str(client[0]).encode()).decode(
            errors="replace"
        )
        if self.running[job] >= self.most:
            return await self._refuse(
                scope,
                send,
                429,
                f"{job}: {self.most} requests of this job are in progress",
            )
        self.running[job] += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.running[job] -= 1
            # Adding an empty Counter removes entries that are 0, so that finished jobs
            # take no memory.
            self.running += Counter()


# Commands that generate, and write their configuration into the run's folder under
# their own name.
GENERATING = ("train", "eval", "generate")
ROLLOUT_POOL = """\
Manage the inference servers of a running job with rollout.engine=server. An added server receives the current weights
before it is used. A removed server finishes the requests it has.

  megaverl rollout-pool list runs/mine
  megaverl rollout-pool add runs/mine http://10.0.0.7:8000
  megaverl rollout-pool remove runs/mine http://10.0.0.5:8000

The command edits the file that the run watches (rollout.servers.file).
"""


def _pool_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("add", "remove", "list"))
    parser.add_argument(
        "run", type=Path, metavar="RUN", help="the folder of a run (run.dir/run.name)"
    )
    parser.add_argument(
        "urls", nargs="*", metavar="URL", help="base URL of a server, with its port"
    )
    add_json(parser)


def _pool(arguments: argparse.Namespace) -> int:
    """List, add or remove the inference servers of a run."""
    from megaverl.rollout.server_pool import addresses_of, change, watched_file

    if bool(arguments.urls) == (arguments.action == "list"):
        raise UsageError("name servers to add or remove, and none to list")
    rollout = _rollout(arguments.run)
    watched = watched_file(rollout.servers, arguments.run)
    for url in arguments.urls:
        if problem := url_problem(url):
            raise UsageError(problem)
        if (
            arguments.action == "add"
            and rollout.servers.token_env is None
            and not is_loopback(url)
        ):
            raise UsageError(
                f"{url} is not on the loopback, and the run has no rollout.servers.token_env"
            )
    if arguments.action == "list":
        return _list(
            rollout, addresses_of(rollout.servers, watched), as_json=arguments.json
        )
    change(watched, arguments.urls, adds=arguments.action == "add")
    print(
        f"{watched}: {', '.join(addresses_of(rollout.servers, watched)) or 'nobody is left'}"
    )
    return 0


def _rollout(run: Path) -> RolloutConfig:
    """Read the section `rollout` of the configuration that a run wrote into its folder.

    Raises:
        UsageError: the folder is not a run's, or the run has no servers.
    """
    written = [
        file for command in GENERATING if (file := run / f"{command}.yaml").is_file()
    ]
    if not written:
        raise UsageError(
            f"{run} is not the folder of a run: it has no {' or '.join(GENERATING)}.yaml"
        )
    file = written[0]
    # The run checked its configuration when it started. Loading all of it again would
    # take seconds.
    rollout = RolloutConfig.model_validate(
        yaml.safe_load(file.read_text(encoding="utf-8"))["rollout"]
    )
    if rollout.engine != "server":
        raise UsageError(
            f"{file}: rollout.engine is {rollout.engine}, which has no servers"
        )
    return rollout


def _list(rollout: RolloutConfig, urls: list[str], *, as_json: bool) -> int:
    """Print for each server whether it answers, and the version of its weights.

    Returns:
        FAILED if one does not answer, else 0.
    """
    from megaverl.rollout.server_pool import connect, token_of

    token = token_of(rollout.servers)
    servers = []
    for url in urls:
        server = connect(rollout.servers, url, token)
        try:
            server.healthy()
            servers.append(
                {"url": url, "answers": True, "weights": server.weight_version()}
            )
        except MegaverlError as error:
            servers.append({"url": url, "answers": False, "why": str(error)})
    if as_json:
        print(json.dumps(servers, indent=2))
    else:
        for entry in servers:
            state = (
                f"answers, weights {entry['weights']}"
                if entry["answers"]
                else entry["why"]
            )
            print(f"{entry['url']}  {state}")
    return 0 if all(entry["answers"] for entry in servers) else FAILED


COMMANDS = {
    "serve": Subcommand(SERVE, _serve_options, _serve),
    "rollout-pool": Subcommand(ROLLOUT_POOL, _pool_options, _pool),
}
