"""Checks of user code and of sampled rows, before models are built.

Code that a configuration names is loaded in a child process (`child_checks`). Rows of
files are read in this process.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from shutil import which
from typing import Any

import msgspec

from megaverl.child_checks import (
    DEADLINE_SECONDS,
    Check,
    CheckResult,
    CheckRunner,
    catch_problem,
    run_in_children,
)
from megaverl.config.errors import ConfigIssue
from megaverl.config.grids import REINFORCING
from megaverl.config.passthrough import PLACES
from megaverl.config.run import DataConfig, SourceConfig
from megaverl.config.schema import Config
from megaverl.errors import DataError, MegaverlError
from megaverl.outside import read_json_file
from megaverl.plugins import load_object

TEMPLATE_BYTES = 8 * 2**30
# Checks that wait for a hub or an image server, which may be slow without being wrong.
MAY_WAIT = ("far_rows", "image_rows")
# Description of each kind of check, for the message if it does not end. All other kinds
# load code.
_DOING = {
    "chat_template": "its chat template is rendered",
    "far_rows": "its first rows are read",
    "image_rows": "its first images are read",
    "own_rows": "its first rows are read",
}
_RISKY = re.compile(r"\brange\b|\*|\bmacro\b|\brecursive\b")


@dataclass(frozen=True)
class CodeCheck:
    """Check of one configuration key.

    Attributes:
        kind: key of `_CHECKS`.
        key: configuration key, for messages.
        name: value of the key, such as `module:object` or a path.
        arguments: names of the positional arguments with which a function is called.
    """

    kind: str
    key: str
    name: str
    arguments: tuple[str, ...] = ()

    @property
    def runs_own_code(self) -> bool:
        """Return whether the check executes user code or imports large libraries."""
        return self.kind not in ("rows", "tools_file")

    @property
    def for_child(self) -> dict[str, Any]:
        """Return the check in the form that `run_in_children` takes."""
        doing = _DOING.get(self.kind)
        more = {} if doing is None else {"doing": doing}
        return {**asdict(self), **more, "may_wait": self.kind in MAY_WAIT}


@dataclass
class Preflight:
    """Result of all checks.

    Attributes:
        issues: mistakes that were found.
        not_checked: short descriptions of what was not checked and why.
        num_rows: number of training rows, or None if they were not counted.
    """

    issues: list[ConfigIssue]
    not_checked: list[str]
    num_rows: int | None = None


def preflight(
    config: Config, command: str, deadline: float = DEADLINE_SECONDS
) -> Preflight:
    """Load the code that the configuration names, and read some rows of every source.

    Args:
        deadline: seconds that each check may take.
    """
    result = Preflight([], [])
    tasks = list(_tasks(config, command))
    inside = [task for task in tasks if not task.runs_own_code]
    outside = [task for task in tasks if task.runs_own_code]
    results = [_run(task, config) for task in inside]
    checks = [task.for_child for task in outside]
    results += run_in_children(
        "megaverl.trainer.code_checks:make_runner", config.to_dict(), checks, deadline
    )
    counts: list[int | None] = []
    for task, result_of_task in zip([*inside, *outside], results, strict=True):
        if result_of_task.problem:
            result.issues.append(
                ConfigIssue(task.key, result_of_task.problem, config.place(task.key))
            )
        if result_of_task.left_out:
            result.not_checked.append(
                f"{task.name}: {result_of_task.left_out.rstrip('.')}"
            )
        if ".train." in task.key:
            counts.append(result_of_task.num_rows)
    if counts and None not in counts:
        result.num_rows = sum(filter(None, counts))
    return result


def _tasks(config: Config, command: str) -> Iterator[CodeCheck]:
    """Yield a check for every key that names code or rows and that `command` reads."""
    if command in (*REINFORCING, "eval"):
        yield from _reward_tasks(config)
        yield from _environment_tasks(config)
    yield from _function_tasks(config, command)
    yield from _template_tasks(config)
    data = config.data
    if data.tools is not None:
        yield CodeCheck("tools_file", "data.tools", data.tools)
    sources = {"data.train": data.train, "data.validation": data.validation}
    if command in ("sft", "quickstart"):
        sources["sft.train"] = config.sft.train
    if command == "eval":
        del sources["data.train"]
    if command in ("dpo", "reward"):
        sources = {}
        for part in ("train", "validation"):
            for index, path in enumerate(getattr(config.preference, part)):
                yield CodeCheck("pairs", f"preference.{part}.{index}", path)
    if command in ("generate", "tinker"):
        sources = {}
    takes_images = _takes_images(config)
    for key, entries in sources.items():
        for index, entry in enumerate(entries):
            kind = _ROWS_OF.get(_source_kind(entry.path), "own_rows")
            yield CodeCheck(
                "image_rows" if takes_images else kind, f"{key}.{index}", entry.path
            )


# Maps the kind of a source to the kind of its check. User code produces the rows of all
# other sources.
_ROWS_OF = {
    "files": "rows",
    "folder": "rows",
    "hub": "far_rows",
    "verifiers": "far_rows",
    "harbor": "rows",
    "nemo_gym": "rows",
    "suite": "far_rows",
}


def _source_kind(path: str) -> str:
    from megaverl.data.sources import kind_of

    return kind_of(path)


def _takes_images(config: Config) -> bool | None:
    """Return whether the model takes images, or None if its config.json is not on this machine."""
    file = Path(config.model.path) / "config.json"
    try:
        return "vision_config" in read_json_file(file)
    except (OSError, ValueError, TypeError):  # a damaged file is reported later
        return None


def _reward_tasks(config: Config) -> Iterator[CodeCheck]:
    for index, entry in enumerate(config.reward):
        if entry.function is not None and entry.path is None:
            yield CodeCheck("reward", f"reward.{index}.function", entry.function)
        if entry.shape is not None:
            yield CodeCheck(
                "function", f"reward.{index}.shape", entry.shape, ("score",)
            )


def _environment_tasks(config: Config) -> Iterator[CodeCheck]:
    name, options = config.environment.name, config.environment.options
    if name is None:
        return
    if ":" in name:
        yield CodeCheck("environment", "environment.name", name)
    if isinstance(function := options.get("function"), str) and name == "gateway":
        arguments = ("base_url", "api_key", "prompt", "reference", "extra")
        yield CodeCheck("function", "environment.options.function", function, arguments)
    if name == "tools":
        yield CodeCheck("tools", "environment.options.tools", name)


def _template_tasks(config: Config) -> Iterator[CodeCheck]:
    """Yield a check that renders the chat template, if its numeric loops, powers or products might not end."""
    key = "model.path" if config.model.tokenizer is None else "model.tokenizer"
    folder = config.model.tokenizer or config.model.path
    if Path(folder).is_dir() and _RISKY.search(_template_of(Path(folder))):
        yield CodeCheck("chat_template", key, folder)


def _template_of(folder: Path) -> str:
    """Return the chat template in a tokenizer's folder, or "" if there is none. A damaged file is reported later."""
    try:
        if (folder / "chat_template.jinja").is_file():
            return (folder / "chat_template.jinja").read_text(encoding="utf-8")
        template = read_json_file(folder / "tokenizer_config.json").get("chat_template")
    except (OSError, ValueError, AttributeError):
        return ""
    return template if isinstance(template, str) else json.dumps(template or "")


def _function_tasks(config: Config, command: str) -> Iterator[CodeCheck]:
    """Yield checks of user functions that sections name. `signatures.py` also reads some of them as text."""
    algorithm, rollout = config.algorithm, config.rollout
    for index, tracker in enumerate(config.run.log_with):
        if ":" in tracker:
            yield CodeCheck("function", f"run.log_with.{index}", tracker, ("info",))
    if command in (*REINFORCING, "eval", "generate", "tinker"):
        if ":" in rollout.engine:
            yield CodeCheck(
                "function", "rollout.engine", rollout.engine, ("model_folder", "config")
            )
        if rollout.function is not None:
            yield CodeCheck(
                "function",
                "rollout.function",
                rollout.function,
                ("generate", "prompts", "sampling", "seeds"),
            )
    if command in REINFORCING:
        if config.trainer.program is not None:
            yield CodeCheck(
                "function", "trainer.program", config.trainer.program, ("run", "step")
            )
        for index, operator in enumerate(config.trainer.operators):
            yield CodeCheck(
                "function", f"trainer.operators.{index}", operator, ("flow",)
            )
        if algorithm.rollout_filter is not None and ":" in algorithm.rollout_filter:
            yield CodeCheck(
                "function",
                "algorithm.rollout_filter",
                algorithm.rollout_filter,
                ("batch", "scores"),
            )
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
                yield CodeCheck("object", key, name)
    if command in ("dpo", "reward"):
        section, loss = (
            ("preference", config.preference.loss)
            if command == "dpo"
            else ("", config.reward_model.loss)
        )
        if ":" in loss:
            yield CodeCheck("object", f"{section or 'reward_model'}.loss", loss)
    yield from _passthrough_tasks(config)


def _passthrough_tasks(config: Config) -> Iterator[CodeCheck]:
    """Yield checks of functions among the fields that are passed to other libraries."""
    values = config.to_dict()
    for place, target in PLACES.items():
        mapping: Any = values
        for part in place.split("."):
            mapping = mapping.get(part) if isinstance(mapping, dict) else None
        fields = target.fields() if mapping else None
        for name, value in (mapping or {}).items():
            is_function = (
                fields and name in fields and "Callable" in fields[name].type_text
            )
            if is_function and isinstance(value, str) and ":" in value:
                yield CodeCheck("object", f"{place}.{name}", value)


def make_runner(context: Any) -> CheckRunner:
    """Return a function that runs one check of a configuration in a child process."""
    config = Config.model_validate(context)

    def run(check: Check) -> CheckResult:
        return _run(msgspec.convert(check, CodeCheck), config)

    return run


def _run(task: CodeCheck, config: Config) -> CheckResult:
    def check() -> CheckResult | None:
        try:
            return _CHECKS[task.kind](task, config)
        except DataError as error:
            if task.kind not in MAY_WAIT or not _is_unreachable(error):
                raise
            return CheckResult(left_out="its rows, as the hub is not reached from here")

    return catch_problem(task.key, task.name, check)


def _check_object(task: CodeCheck, config: Config) -> Any:
    load_object(task.name, task.key)


def _check_function(task: CodeCheck, config: Config) -> None:
    function = load_object(task.name, task.key)
    if not callable(function):
        raise MegaverlError(f"It is {type(function).__name__}; expected a function.")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a C function
    try:
        bound = (
            signature.bind_partial if task.key == "rollout.engine" else signature.bind
        )
        bound(*task.arguments)
    except TypeError as error:
        raise MegaverlError(
            f"It takes {signature}, and is called with {', '.join(task.arguments)}: {error}."
        ) from error


def _check_reward(task: CodeCheck, config: Config) -> None:
    from megaverl.rewards import build_reward
    from megaverl.rewards.binding import RowNames

    index = int(task.key.split(".")[1])
    entry = config.reward[index].model_copy(update={"only_if": None, "shape": None})
    row = RowNames(prompt=config.data.prompt_key, answer=config.data.answer_key)
    reward = build_reward([entry], modules=config.reward_modules, row=row)
    if (columns := _first_columns(config)) is not None:
        reward.check_columns(columns)


def _first_columns(config: Config) -> frozenset[str] | None:
    """Return the columns other than prompt and answer in a sample of all training files.

    None if a source is not a file or folder.
    """
    from megaverl.data.row_samples import RowSample

    columns: set[str] = set()
    for entry in config.data.train:
        if _source_kind(entry.path) not in ("files", "folder"):
            return None
        for row in RowSample(entry):
            columns |= row.columns.keys()
    return frozenset(columns - {config.data.prompt_key, config.data.answer_key})


def _check_environment(task: CodeCheck, config: Config) -> None:
    from megaverl.rollout.environments import check_options

    check_options(task.name, config.environment.options)


def _check_tools(task: CodeCheck, config: Config) -> None:
    from megaverl.rollout.environments.tools import BUILT_IN, tool_specs

    for name, spec in tool_specs(
        config.environment.options.get("tools", ("calculator",))
    ).items():
        if "function" in spec and spec["function"] not in BUILT_IN.values():
            function = load_object(spec["function"], f"{task.key}.{name}")
            if not callable(function):
                raise MegaverlError(
                    f"{name} is {type(function).__name__}; expected a function."
                )
        if "search" in spec and not Path(str(spec["search"])).exists():
            raise MegaverlError(f"{name}: {spec['search']} does not exist.")
        command = spec.get("mcp")
        if isinstance(command, list | tuple) and which(str(command[0])) is None:
            raise MegaverlError(f"{name}: the command {command[0]} is not found.")


def _check_template(task: CodeCheck, config: Config) -> None:
    """Render a chat template for one message to see that it ends.

    Errors of the template are ignored here. They are reported with the row and in the
    words of its tokenizer.
    """
    import resource

    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (TEMPLATE_BYTES, hard))
    try:
        template = environment.from_string(_template_of(Path(task.name)))
        template.render(
            messages=[{"role": "user", "content": "Hello"}], add_generation_prompt=True
        )
    except MemoryError:
        raise MegaverlError(
            f"Its chat template needs more than {TEMPLATE_BYTES // 2**30} GiB of memory."
        ) from None
    # Names that transformers adds to templates are undefined here.
    except Exception:
        return
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _check_tools_file(task: CodeCheck, config: Config) -> None:
    from megaverl.data.prompts import load_tools

    load_tools(task.name)


def _check_rows(task: CodeCheck, config: Config) -> CheckResult:
    """Read the columns of the first rows of a source, and of some later rows."""
    from megaverl.data.prompts import Columns
    from megaverl.data.row_samples import RowSample

    data = config.data
    columns = Columns(data.prompt_key, data.answer_key, data.tools_key)
    is_known = _takes_images(config) is not None
    has_images = False
    sample = RowSample(_source_of(task, config))
    for row, where in sample:
        if not is_known and _has_images(row, data):
            has_images = True
        else:
            columns.read(row, where)
    left_out = (
        "its images, as the model's config.json is not on this machine"
        if has_images
        else ""
    )
    return CheckResult("", sample.num_rows, left_out)


def _is_unreachable(error: BaseException) -> bool:
    """Return whether an error comes from the network, by the exception types of network clients."""
    reasons: list[BaseException] = [error]
    while (
        cause := reasons[-1].__cause__ or reasons[-1].__context__
    ) is not None and cause not in reasons:
        reasons.append(cause)
    names = {kind.__name__ for reason in reasons for kind in type(reason).__mro__}
    is_refused = names & {
        "DatasetNotFoundError",
        "RepositoryNotFoundError",
        "DataFilesNotFoundError",
    }
    return not is_refused and bool(
        names & {"ConnectionError", "TimeoutError", "TransportError", "HTTPError"}
    )


def _check_image_rows(task: CodeCheck, config: Config) -> CheckResult:
    """Read rows like `_check_rows`, and also the headers of their images."""
    from megaverl.data.images import Images
    from megaverl.data.prompts import Columns
    from megaverl.data.row_samples import RowSample
    from megaverl.data.tokenizers import load_tokenizer

    data, model = config.data, config.model
    tokenizer = load_tokenizer(
        model.tokenizer or model.path, trust_remote_code=model.trust_remote_code
    )
    images = Images.of(data.images, model.path, tokenizer)
    columns = Columns(data.prompt_key, data.answer_key, data.tools_key, images=images)
    sample = RowSample(_source_of(task, config))
    for row, where in sample:
        columns.read(row, where)
    return CheckResult("", sample.num_rows)


def _source_of(task: CodeCheck, config: Config) -> SourceConfig:
    section, part, index, *_ = task.key.split(".")
    source: SourceConfig = getattr(getattr(config, section), part)[int(index)]
    return source


def _has_images(row: Mapping[str, Any], data: DataConfig) -> bool:
    """Return whether a row, or a message in its prompt, contains images."""
    text = json.dumps(row.get(data.prompt_key), default=str)
    return row.get(data.images.key) is not None or "<image>" in text or '"image' in text


def _check_pairs(task: CodeCheck, config: Config) -> CheckResult:
    """Read the columns of the first rows of a file of pairs."""
    from megaverl.data.preferences import PreferenceColumns
    from megaverl.data.prompts import Columns
    from megaverl.data.row_samples import RowSample

    preferences = PreferenceColumns.of(config.preference)
    columns = Columns(config.data.prompt_key, None, config.data.tools_key)
    sample = RowSample(SourceConfig(path=task.name))
    for row, where in sample:
        columns.read(row, where)
        preferences.read(row, where)
    return CheckResult("", sample.num_rows)


_CHECKS: dict[str, Callable[[CodeCheck, Config], CheckResult | None]] = {
    "object": _check_object,
    "function": _check_function,
    "reward": _check_reward,
    "environment": _check_environment,
    "tools": _check_tools,
    "tools_file": _check_tools_file,
    "chat_template": _check_template,
    "rows": _check_rows,
    "own_rows": _check_rows,
    "far_rows": _check_rows,
    "image_rows": _check_image_rows,
    "pairs": _check_pairs,
}
