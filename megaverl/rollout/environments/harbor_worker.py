"""Process that runs Harbor's trials: `PYTHON -P harbor_worker.py`.

(-P: the folder of this file has a module of the package's name.) It runs under the
interpreter that has harbor, and imports nothing of megaverl. The first line of its input
is the setting, every further line a trial or the end of one, and each trial gets one
line of answer:

    {"machine": [COMMAND, ...]}                                    -->
    {"id": 1, "base_url": ..., "trial": {fields of TrialConfig}}   -->
                    <--  {"id": 1, "rewards": {...}, "valid": true, "failures": [...]}
                    <--  {"id": 1, "mistake": TEXT}  if the task or the options are wrong
                    <--  {"id": 1, "fault": TEXT}    if Harbor itself fails
    {"id": 1, "cancel": true}                                      -->

It ends when its input does.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

# Module of the environment `namespaces`, under a name that Harbor can import.
MACHINE_MODULE = "megaverl_harbor_machine"
NAMESPACES = "namespaces"


def serve() -> None:
    """Answer on standard output until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # Harbor and agents print. Their output goes to standard error.
    os.dup2(2, 1)

    def answer(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    asyncio.run(_serve(answer))
    # Trials that do not end must not keep this process.
    os._exit(0)


async def _serve(answer: Any) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 30)
    await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    setting = json.loads(await reader.readline())
    # Users' agents are imported from where the run was started.
    sys.path.append(os.getcwd())
    machine: Any = _load_machine()
    machine.COMMAND = setting["machine"]
    trials: dict[int, asyncio.Task[None]] = {}
    while line := await reader.readline():
        request = json.loads(line)
        number = request["id"]
        if request.get("cancel"):
            if number in trials:
                trials[number].cancel()
            continue
        trials[number] = trial = asyncio.create_task(_play(request, answer))
        trial.add_done_callback(functools.partial(_forget, trials, number))
    for trial in list(trials.values()):
        trial.cancel()
    await asyncio.gather(*trials.values(), return_exceptions=True)


def _forget(trials: dict[int, Any], number: int, _: Any) -> None:
    trials.pop(number, None)


def _load_machine() -> ModuleType:
    file = Path(__file__).with_name("harbor_machine.py")
    spec = importlib.util.spec_from_file_location(MACHINE_MODULE, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[MACHINE_MODULE] = module
    spec.loader.exec_module(module)
    return module


async def _play(request: dict[str, Any], answer: Any) -> None:
    """Run one trial and send its answer."""
    number = request["id"]
    try:
        trial = await _make_trial(request)
    except OSError as error:
        # A download may fail for a while. A task that is not there is a mistake.
        kind = "mistake" if isinstance(error, FileNotFoundError) else "fault"
        answer({"id": number, kind: _describe(error)})
        return
    except Exception as error:
        answer({"id": number, "mistake": _describe(error)})
        return
    refused = sys.modules[MACHINE_MODULE].TaskRefused.__name__
    try:
        result = await trial.run()
    except Exception as error:
        # Harbor records failures of a trial. This one is of its end, such as a
        # container that cannot be stopped.
        answer({"id": number, "fault": _describe(error)})
        return
    failures = [
        {"type": each.exception_type, "message": each.exception_message}
        for each in result.recorded_exceptions()
    ]
    for failure in failures:
        if failure["type"] == refused:
            answer({"id": number, "mistake": failure["message"]})
            return
    verified = result.verifier_result
    answer(
        {
            "id": number,
            "rewards": (verified.rewards or {}) if verified is not None else {},
            "valid": result.reward_valid,
            "failures": failures,
        }
    )


async def _make_trial(request: dict[str, Any]) -> Any:
    """Return the trial of a request, whose agent calls the gateway.

    Raises:
        Exception: the task, the agent or an option is wrong.
    """
    from harbor.agents.factory import AgentFactory
    from harbor.models.trial.config import TrialConfig
    from harbor.trial.trial import Trial

    fields = request["trial"]
    environment = fields["environment"]
    if environment.get("type") == NAMESPACES:
        del environment["type"]
        environment["import_path"] = f"{MACHINE_MODULE}:MachineEnvironment"
    config = TrialConfig.model_validate(fields)
    agent_class = AgentFactory.get_agent_class_from_config(config.agent)
    if agent_class.capabilities.base_url:
        config.agent.base_url = request["base_url"]
    return await Trial.create(config)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    serve()
