"""Process that serves agents and resources servers of NeMo Gym: `PYTHON -P nemo_gym_servers.py`.

(-P: the folder of this file has a module of the package's name.)

It runs under the interpreter that has nemo-gym, and imports nothing of megaverl. The
first line of its input is the setting, one line of its output is the answer:

    {"config_paths": [...], "overrides": {...}, "model_server": NAME, "host": ..., "port": ...}
    {"agents": {NAME: URL}}  or  {"mistake": TEXT}

It ends when its input does.

Why not `gym env start`: that makes a virtual environment for each server with uv, starts
a Ray cluster, and runs each server as a process. Servers that need this run under
`gym env start`, and the run is given the address of its head server.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

AGENTS = "responses_api_agents"
MODELS = "responses_api_models"
GATEWAY = "gateway"  # a model server of this kind is a gateway, which runs already
POLL_SECONDS = 0.02
# A server's file ends by starting the server's class.
STARTS_CLASS = re.compile(r"(\w+)\.run_webserver\(\)")


def serve() -> None:
    """Read the setting, start the servers, and serve until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # Servers print. Their output goes to standard error, apart from the answer.
    os.dup2(2, 1)
    setting = json.loads(sys.stdin.buffer.readline())
    # NeMo Gym's own command-line parser must not read this process's arguments.
    sys.argv[1:] = []

    def answer(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        config = read_config(setting)
        apps = make_apps(config)
    except Exception as error:
        # A configuration or a server's module may raise anything.
        answer({"mistake": f"{type(error).__name__}: {error}"})
        return
    asyncio.run(run(apps, answer))


def read_config(setting: dict[str, Any]) -> Any:
    """Return NeMo Gym's global configuration, in which the gateway is the model server."""
    from nemo_gym import global_config
    from omegaconf import OmegaConf

    policy = {"entrypoint": "app.py", "host": setting["host"], "port": setting["port"]}
    values = {
        "config_paths": setting["config_paths"],
        setting["model_server"]: {MODELS: {GATEWAY: policy}},
        **setting["overrides"],
    }
    parse = global_config.GlobalConfigDictParserConfig(
        initial_global_config_dict=OmegaConf.create(values),
        skip_load_from_cli=True,
        skip_load_from_dotenv=True,
    )
    global_config.set_global_config_dict(parse)
    return global_config.get_global_config_dict()


def make_apps(config: Any) -> dict[str, tuple[str, Any, str, int]]:
    """Return the application of each server except gateways, as {name: (kind, application, host, port)}.

    Raises:
        Exception: a server's module or configuration does not work.
    """
    from nemo_gym.global_config import GlobalConfigDictParser
    from nemo_gym.server_utils import ServerClient
    from omegaconf import OmegaConf

    apps: dict[str, tuple[str, Any, str, int]] = {}
    client = ServerClient(
        head_server_config=ServerClient.load_head_server_config(),
        global_config_dict=config,
    )
    for instance in GlobalConfigDictParser().filter_for_server_instance_configs(config):
        name, kind = instance.name, instance.SERVER_TYPE
        servers: Any = OmegaConf.to_container(config[name][kind], resolve=True)
        [(folder, settings)] = servers.items()
        if (kind, folder) == (MODELS, GATEWAY):
            continue
        file = find_entrypoint(Path(kind, folder, settings["entrypoint"]))
        server_class = load_class(file, f"nemo_gym_server_{len(apps)}")
        config_class = server_class.model_fields["config"].annotation
        server_config = config_class.model_validate({**settings, "name": name})
        server = server_class(config=server_config, server_client=client)
        app = server.setup_webserver()
        server.setup_liveness(app)
        server.setup_exception_middleware(app)
        apps[name] = (kind, app, server_config.host, server_config.port)
    return apps


def find_entrypoint(path: Path) -> Path:
    """Return the file of a server: in the working directory, or else where NeMo Gym is installed.

    Raises:
        FileNotFoundError: it is in neither.
    """
    from nemo_gym import PARENT_DIR

    places = [folder / path for folder in (Path.cwd(), PARENT_DIR)]
    for file in places:
        if file.is_file():
            return file
    raise FileNotFoundError(f"no file {' or '.join(map(str, places))}")


def load_class(file: Path, module_name: str) -> Any:
    """Return the class of the server that a file starts when it is run.

    Raises:
        ValueError: the file starts none.
    """
    started = STARTS_CLASS.findall(file.read_text(encoding="utf-8"))
    if not started:
        raise ValueError(f"{file} starts no server: it has no CLASS.run_webserver()")
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Python adds the folder of a script to the path, and servers import from there.
    sys.path.append(str(file.parent))
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return getattr(module, started[-1])


async def run(apps: dict[str, tuple[str, Any, str, int]], answer: Any) -> None:
    """Serve the applications on one event loop, which NeMo Gym's HTTP client also belongs to."""
    import uvicorn

    servers = [
        uvicorn.Server(
            uvicorn.Config(
                app, host=host, port=port, log_level="warning", timeout_keep_alive=30
            )
        )
        for _, app, host, port in apps.values()
    ]
    tasks = [asyncio.create_task(server.serve()) for server in servers]
    while not all(server.started for server in servers):
        if any(task.done() for task in tasks):
            raise SystemExit("a server has ended while it started")
        await asyncio.sleep(POLL_SECONDS)
    agents = {
        name: f"http://{host}:{port}"
        for name, (kind, _, host, port) in apps.items()
        if kind == AGENTS
    }
    answer({"agents": agents})
    # Ends when the rank closes its end of the pipe.
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)
    os._exit(0)


if __name__ == "__main__":
    serve()
