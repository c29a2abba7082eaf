"""Checks of a run's own code and of its first rows, before any rank starts.

Code that a configuration names is imported in a child process with a deadline: it may raise, exit, block or print,
and does none of that to the command. Each check is a `Task`; the child reports before and after each, so that the
parent knows which one ended or blocked it.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from shutil import which
from typing import IO, Any

from megaverl.config.errors import ConfigIssue
from megaverl.config.grids import REINFORCING
from megaverl.config.passthrough import PLACES
from megaverl.config.schema import Config
from megaverl.errors import MegaverlError
from megaverl.outside import read_json_file
from megaverl.plugins import load_module, load_object

# A module that imports torch or transformers takes a few seconds; one that takes a minute blocks.
DEADLINE_SECONDS = 60.0
FIRST_ROWS = 16
SPREAD_ROWS = 16
# Larger files are read from the front only: to number all rows of one would take as long as the run's own start.
LARGE_BYTES = 256 * 2**20
_TAIL = 600
TEMPLATE_BYTES = 8 * 2**30
_RISKY = re.compile(r"\brange\b|\*|\bmacro\b|\brecursive\b")


@dataclass(frozen=True)
class Task:
    """One check.

    Attributes:
        kind: a key of `_CHECKS`.
        key: the configuration's key, for messages.
        name: what the key holds: `module:object`, a path.
        arguments: names of the positional arguments that a function is called with.
    """

    kind: str
    key: str
    name: str
    arguments: tuple[str, ...] = ()

    @property
    def runs_own_code(self) -> bool:
        """Whether the check executes code of the user's own or imports large libraries."""
        return self.kind not in ("rows", "tools_file")


@dataclass
class Preflight:
    """What was found.

    Attributes:
        not_checked: what was not looked at, and why, in a few words each.
        num_rows: training rows; None where they were not counted.
    """

    issues: list[ConfigIssue]
    not_checked: list[str]
    num_rows: int | None = None


def preflight(config: Config, command: str, deadline: float = DEADLINE_SECONDS) -> Preflight:
    """Load the code that the configuration names, and read some rows of every source.

    Args:
        deadline: seconds that each check may take.
    """
    result = Preflight([], [])
    counts: dict[str, int | None] = {}
    tasks = list(_tasks(config, command, result.not_checked))
    own = [task for task in tasks if task.runs_own_code]
    for task in tasks:
        if not task.runs_own_code:
            problem, count = _run(task, config)
            counts[task.key] = count
            if problem:
                result.issues.append(ConfigIssue(task.key, problem))
    for task, problem, count in _in_children(own, config, deadline):
        counts[task.key] = count
        if problem:
            result.issues.append(ConfigIssue(task.key, problem))
    training = [count for key, count in counts.items() if ".train." in key]
    if training and None not in training:
        result.num_rows = sum(count for count in training if count is not None)
    return result


def probe_modules(names: Sequence[str], deadline: float = DEADLINE_SECONDS) -> list[ConfigIssue]:
    """Import `reward_modules` in a child process; return what is wrong with them."""
    tasks = [Task("module", f"reward_modules.{index}", name) for index, name in enumerate(names)]
    return [ConfigIssue(task.key, problem) for task, problem, _ in _in_children(tasks, Config(), deadline) if problem]


def _tasks(config: Config, command: str, not_checked: list[str]) -> Iterator[Task]:
    """Yield a check of every key that names code or rows, as far as `command` reads it."""
    if command in (*REINFORCING, "eval"):
        yield from _reward_tasks(config)
        yield from _environment_tasks(config)
    yield from _function_tasks(config, command)
    yield from _template_tasks(config)
    data = config.data
    if data.tools is not None:
        yield Task("tools_file", "data.tools", data.tools)
    sources = {"data.train": data.train, "data.validation": data.validation}
    if command in ("sft", "quickstart"):
        sources["sft.train"] = config.sft.train
    if command == "eval":
        del sources["data.train"]
    if command in ("dpo", "reward"):
        sources = {}
        for part in ("train", "validation"):
            for index, path in enumerate(getattr(config.preference, part)):
                yield Task("pairs", f"preference.{part}.{index}", path)
    if command == "generate":
        sources = {}
    for key, entries in sources.items():
        for index, entry in enumerate(entries):
            kind = _source_kind(entry.path)
            if kind in ("hub", "verifiers"):
                not_checked.append(f"rows of {entry.path}")
            else:
                yield Task("rows" if kind in ("files", "folder") else "own_rows", f"{key}.{index}", entry.path)


def _source_kind(path: str) -> str:
    from megaverl.data.sources import kind_of

    return kind_of(path)


def _reward_tasks(config: Config) -> Iterator[Task]:
    for index, entry in enumerate(config.reward):
        if entry.function is not None and entry.path is None:
            yield Task("reward", f"reward.{index}.function", entry.function)
        if entry.shape is not None:
            yield Task("function", f"reward.{index}.shape", entry.shape, ("score",))


def _environment_tasks(config: Config) -> Iterator[Task]:
    name, options = config.environment.name, config.environment.options
    if name is None:
        return
    if ":" in name:
        yield Task("environment", "environment.name", name)
    if isinstance(function := options.get("function"), str) and name == "gateway":
        arguments = ("base_url", "api_key", "prompt", "reference", "extra")
        yield Task("function", "environment.options.function", function, arguments)
    if name == "tools":
        yield Task("tools", "environment.options.tools", name)


def _template_tasks(config: Config) -> Iterator[Task]:
    """Yield the rendering of a chat template that has loops over numbers, powers or products, which may not end."""
    key = "model.path" if config.model.tokenizer is None else "model.tokenizer"
    folder = config.model.tokenizer or config.model.path
    if Path(folder).is_dir() and _RISKY.search(_template_of(Path(folder))):
        yield Task("chat_template", key, folder)


def _template_of(folder: Path) -> str:
    """Return the chat template in a tokenizer's folder, or "" if there is none; a damaged file is reported later."""
    try:
        if (folder / "chat_template.jinja").is_file():
            return (folder / "chat_template.jinja").read_text(encoding="utf-8")
        found = read_json_file(folder / "tokenizer_config.json").get("chat_template")
    except (OSError, ValueError, AttributeError):
        return ""
    return found if isinstance(found, str) else json.dumps(found or "")


def _function_tasks(config: Config, command: str) -> Iterator[Task]:
    """Yield the functions of a user's own that sections name; `signatures.py` reads some of them as text too."""
    algorithm, rollout = config.algorithm, config.rollout
    for index, tracker in enumerate(config.run.log_with):
        if ":" in tracker:
            yield Task("function", f"run.log_with.{index}", tracker, ("info",))
    if command in (*REINFORCING, "eval", "generate"):
        if ":" in rollout.engine:
            yield Task("function", "rollout.engine", rollout.engine, ("model_folder", "config"))
        if rollout.function is not None:
            yield Task("function", "rollout.function", rollout.function, ("generate", "prompts", "sampling", "seeds"))
    if command in REINFORCING:
        for index, operator in enumerate(config.trainer.operators):
            yield Task("function", f"trainer.operators.{index}", operator, ("flow",))
        if algorithm.rollout_filter is not None and ":" in algorithm.rollout_filter:
            yield Task("function", "algorithm.rollout_filter", algorithm.rollout_filter, ("batch", "scores"))
        named = {
            "algorithm.advantage": algorithm.advantage,
            "algorithm.policy_loss": algorithm.policy_loss,
            "algorithm.token_selector": algorithm.token_selector,
            "algorithm.loss_aggregation": algorithm.loss_aggregation,
            "algorithm.value_loss": algorithm.value_loss,
            "algorithm.correction.kind": algorithm.correction.kind,
            "algorithm.kl.kind": algorithm.kl.kind,
            "algorithm.distillation.divergence": algorithm.distillation.divergence,
        }
        for key, name in named.items():
            if name is not None and ":" in name:
                yield Task("object", key, name)
    if command in ("dpo", "reward"):
        section, loss = ("preference", config.preference.loss) if command == "dpo" else ("", config.reward_model.loss)
        if ":" in loss:
            yield Task("object", f"{section or 'reward_model'}.loss", loss)
    yield from _passthrough_tasks(config)


def _passthrough_tasks(config: Config) -> Iterator[Task]:
    """Yield the functions among the fields that are handed to other libraries."""
    values = config.to_dict()
    for place, target in PLACES.items():
        mapping: Any = values
        for part in place.split("."):
            mapping = mapping.get(part) if isinstance(mapping, dict) else None
        fields = target.fields() if mapping else None
        for name, value in (mapping or {}).items():
            is_function = fields and name in fields and "Callable" in fields[name].type_text
            if is_function and isinstance(value, str) and ":" in value:
                yield Task("object", f"{place}.{name}", value)


def _in_children(tasks: Sequence[Task], config: Config, deadline: float) -> Iterator[tuple[Task, str, int | None]]:
    """Run the tasks in a child process, and in another one from where it ends or blocks."""
    left = list(tasks)
    while left:
        done = 0
        for problem, count in _in_a_child(left, config, deadline):
            yield left[done], problem, count
            done += 1
        left = left[done:] if done else []


def _in_a_child(tasks: Sequence[Task], config: Config, deadline: float) -> Iterator[tuple[str, int | None]]:
    """Yield (problem, rows) of the tasks in order, up to and with the first that ends the process or blocks."""
    request = json.dumps({"config": config.to_dict(), "tasks": [asdict(task) for task in tasks]})
    command = [sys.executable, "-c", "from megaverl.config.preflight import main; main()"]
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # it ended at once, which shows below
                process.stdin.write(request.encode())
                process.stdin.close()
            for task in tasks:
                line = _line_of(process.stdout, deadline)
                if line is None:
                    yield f"did not finish within {deadline:g} s as {_happening(task)}.", None
                    return
                if not line:
                    code = process.wait()
                    ended = f"by signal {-code}" if code < 0 else f"with exit code {code}"
                    errors.seek(max(0, errors.seek(0, os.SEEK_END) - _TAIL))
                    tail = errors.read().decode(errors="replace").strip()
                    said = f" Its last words: {tail.splitlines()[-1]}" if tail else ""
                    yield f"ends the process {ended} as {_happening(task)}.{said}", None
                    return
                answer = json.loads(line)
                yield answer["problem"], answer["count"]
        finally:
            _end(process)


def _happening(task: Task) -> str:
    return "its chat template is rendered" if task.kind == "chat_template" else "it is loaded"


def _line_of(stream: IO[bytes], deadline: float) -> bytes | None:
    """Return the next line; empty at the end of the stream, None after the deadline."""
    line = b""
    end = time.monotonic() + deadline
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            if not selector.select(max(0.0, end - time.monotonic())):
                return None
            part = os.read(stream.fileno(), 1)
            if not part:
                return b""
            line += part
    return line


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the child and whatever it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _run(task: Task, config: Config) -> tuple[str, int | None]:
    """Return what is wrong with a task ("" for nothing), and the number of rows where it counts them."""
    try:
        return "", _CHECKS[task.kind](task, config)
    except MegaverlError as error:
        said = str(error)
        for prefix in (f"{task.key}: ", "reward.function: ", "reward_modules: ", "data: "):
            said = said.removeprefix(prefix)
        return (said if task.name in said else f"found {task.name!r}. {said}"), None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit of a user's code too
        return f"found {task.name!r}, which raises {type(error).__name__}: {str(error)[:200]}", None


def _check_module(task: Task, config: Config) -> None:
    load_module(task.name, task.key)


def _check_object(task: Task, config: Config) -> Any:
    load_object(task.name, task.key)


def _check_function(task: Task, config: Config) -> None:
    function = load_object(task.name, task.key)
    if not callable(function):
        raise MegaverlError(f"It is {type(function).__name__}; expected a function.")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # of a function in C
    try:
        bound = signature.bind_partial if task.key == "rollout.engine" else signature.bind
        bound(*task.arguments)
    except TypeError as error:
        raise MegaverlError(
            f"It takes {signature}, and is called with {', '.join(task.arguments)}: {error}."
        ) from error


def _check_reward(task: Task, config: Config) -> None:
    from megaverl.rewards import build_reward
    from megaverl.rewards.binding import RowNames

    index = int(task.key.split(".")[1])
    entry = config.reward[index].model_copy(update={"only_if": None, "shape": None})
    row = RowNames(prompt=config.data.prompt_key, answer=config.data.answer_key)
    build_reward([entry], modules=config.reward_modules, row=row)


def _check_environment(task: Task, config: Config) -> None:
    from megaverl.rollout.environments import check_options

    check_options(task.name, config.environment.options)


def _check_tools(task: Task, config: Config) -> None:
    from megaverl.rollout.environments.tools import BUILT_IN, tool_specs

    for name, spec in tool_specs(config.environment.options.get("tools", ("calculator",))).items():
        if "function" in spec and spec["function"] not in BUILT_IN.values():
            function = load_object(spec["function"], f"{task.key}.{name}")
            if not callable(function):
                raise MegaverlError(f"{name} is {type(function).__name__}; expected a function.")
        if "search" in spec and not Path(str(spec["search"])).exists():
            raise MegaverlError(f"{name}: {spec['search']} does not exist.")
        command = spec.get("mcp")
        if isinstance(command, list | tuple) and which(str(command[0])) is None:
            raise MegaverlError(f"{name}: the command {command[0]} is not found.")


def _check_template(task: Task, config: Config) -> None:
    """Render a chat template for one message; what it refuses is an error of a row, in the words of its tokenizer."""
    import resource

    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (TEMPLATE_BYTES, hard))
    try:
        template = environment.from_string(_template_of(Path(task.name)))
        template.render(messages=[{"role": "user", "content": "Hello"}], add_generation_prompt=True)
    except MemoryError:
        raise MegaverlError(f"Its chat template needs more than {TEMPLATE_BYTES // 2**30} GiB of memory.") from None
    except Exception:  # names that transformers adds are not known here
        return
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _check_tools_file(task: Task, config: Config) -> None:
    from megaverl.data.prompts import load_tools

    load_tools(task.name)


def _check_rows(task: Task, config: Config) -> int | None:
    """Read the columns of the first rows of a source, and of some further on."""
    from megaverl.data.prompts import Columns
    from megaverl.data.sources import open_source

    section, part, index, *_ = task.key.split(".")
    entry = getattr(getattr(config, section), part)[int(index)]
    if Path(entry.path).is_file() and Path(entry.path).stat().st_size > LARGE_BYTES:
        return None
    data = config.data
    columns = Columns(data.prompt_key, data.answer_key, data.tools_key)
    rows = open_source(entry)
    for number in _sample(len(rows)):
        row, where = rows[number], rows.where(number)
        if data.images.key in row or "<image>" in json.dumps(row.get(data.prompt_key), default=str):
            continue  # images are read by the model's own processor
        columns.read(row, where)
    return len(rows)


def _check_pairs(task: Task, config: Config) -> int:
    """Read the columns of the first rows of a file of pairs."""
    from megaverl.data.preferences import PreferenceColumns
    from megaverl.data.prompts import Columns
    from megaverl.data.sources import open_source

    preferences = PreferenceColumns.of(config.preference)
    columns = Columns(config.data.prompt_key, None, config.data.tools_key)
    rows = open_source(task.name)
    for number in _sample(len(rows)):
        row, where = rows[number], rows.where(number)
        columns.read(row, where)
        preferences.read(row, where)
    return len(rows)


def _sample(count: int) -> list[int]:
    """Return the numbers of the first rows and of some spread over the others, the last among them."""
    first = range(min(FIRST_ROWS, count))
    further = {count - 1 - number * count // SPREAD_ROWS for number in range(SPREAD_ROWS)}
    return [*first, *sorted(number for number in further if number >= FIRST_ROWS)]


_CHECKS: dict[str, Any] = {
    "module": _check_module,
    "object": _check_object,
    "function": _check_function,
    "reward": _check_reward,
    "environment": _check_environment,
    "tools": _check_tools,
    "tools_file": _check_tools_file,
    "chat_template": _check_template,
    "rows": _check_rows,
    "own_rows": _check_rows,
    "pairs": _check_pairs,
}


def main() -> None:
    """Run the tasks of {"config": ..., "tasks": [...]} on the input; what user code prints goes nowhere."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    silent = os.open(os.devnull, os.O_RDWR)
    request = json.loads(sys.stdin.read())
    os.dup2(silent, 0)
    os.dup2(silent, 1)
    config = Config.model_validate(request["config"])
    for given in request["tasks"]:
        task = Task(**{**given, "arguments": tuple(given["arguments"])})
        problem, count = _run(task, config)
        answers.write(json.dumps({"problem": problem, "count": count if isinstance(count, int) else None}) + "\n")
        answers.flush()
    answers.close()
    os._exit(0)  # threads that user code has started do not hold it
