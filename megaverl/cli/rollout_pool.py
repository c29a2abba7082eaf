"""`megaverl rollout-pool`: servers join and leave a run that goes on."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megaverl.cli.options import Subcommand, UsageError, add_json
from megaverl.config import RolloutConfig
from megaverl.config.loader import load_config
from megaverl.errors import FAILED, MegaverlError
from megaverl.rollout.server_api import is_loopback, url_problem

GENERATING = ("train", "eval", "generate")  # what writes its configuration into the run's folder
DESCRIPTION = """\
The inference servers of a run with rollout.engine=server, while it goes on. A server that is added gets the current
weights before it is used; one that is removed answers what it has been asked.

  megaverl rollout-pool list runs/mine
  megaverl rollout-pool add runs/mine http://10.0.0.7:8000
  megaverl rollout-pool remove runs/mine http://10.0.0.5:8000

It writes the file that the run watches (rollout.servers.file); an editor does as well.
"""


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("add", "remove", "list"))
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run (run.dir/run.name)")
    parser.add_argument("urls", nargs="*", metavar="URL", help="a server's root, with its port")
    add_json(parser)


def _run(arguments: argparse.Namespace) -> int:
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


COMMANDS = {"rollout-pool": Subcommand(DESCRIPTION, _options, _run)}
