"""Section `evaluation`: suites of published data sets and tasks of other harnesses, and how samples are drawn."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, NamedTuple, get_args
from urllib.parse import parse_qsl, urlencode

from pydantic import BeforeValidator, Field

from megaverl.config.errors import ConfigIssue
from megaverl.config.section import (
    Issues,
    Minutes,
    Positive,
    Section,
    Several,
    Text,
    rule,
)
from megaverl.config.wording import yaml_text

SuiteName = Literal["aime", "gpqa", "code", "gsm8k", "math"]
SUITE_NAMES: tuple[str, ...] = get_args(SuiteName)
# Scheme of a source of prompts:
# suite:NAME?path=PATH&split=SPLIT&subset=SUBSET&revision=COMMIT&limit=N&seed=N
SUITE_PREFIX = "suite:"
SUITE_OPTIONS = ("path", "split", "subset", "revision", "limit", "seed")
# Options that evaluation.data may have after the path; the others have keys of their
# own.
DATA_OPTIONS = ("split", "subset", "revision")


HarnessName = Literal["inspect", "lm-eval"]
HARNESS_NAMES: tuple[str, ...] = get_args(HarnessName)
HARNESS_MODULES = {"inspect": "inspect_ai", "lm-eval": "lm_eval"}


class HarnessTask(NamedTuple):
    """Task of an evaluation harness, written HARNESS:TASK.

    Attributes:
        harness: one of `HARNESS_NAMES`.
        task: the task as the harness names it, such as my_task.py@my_task or gsm8k.
    """

    harness: str
    task: str

    @classmethod
    def parse(cls, text: str) -> HarnessTask:
        """Parse `HARNESS:TASK`.

        Raises:
            ValueError: the text does not have this form; says what is wrong.
        """
        harness, _, task = text.partition(":")
        if harness not in HARNESS_NAMES or not task.strip():
            raise ValueError(
                f"write a harness and its task: {' or '.join(f'{name}:TASK' for name in HARNESS_NAMES)}"
            )
        return cls(harness, task.strip())

    def __str__(self) -> str:
        return f"{self.harness}:{self.task}"

    @property
    def file_name(self) -> str:
        """Return a name for files and folders of the task."""
        return re.sub(r"[^\w.-]+", "_", str(self)).strip("_")

    @property
    def source(self) -> str | None:
        """Return the file of a task of one's own for inspect-ai, or None for a task that is installed."""
        file = self.task.partition("@")[0]
        return file if self.harness == "inspect" and file.endswith(".py") else None


class SuiteDefaults(NamedTuple):
    """Data set that a suite's figures are usually quoted for, and the usual number of samples."""

    data: str
    samples: int


SUITE_DEFAULTS = {
    "aime": SuiteDefaults("HuggingFaceH4/aime_2024?split=train", 32),
    "gpqa": SuiteDefaults("Idavidrein/gpqa?subset=gpqa_diamond&split=train", 4),
    "code": SuiteDefaults("open-r1/codeforces?subset=verifiable&split=test", 4),
    "gsm8k": SuiteDefaults("openai/gsm8k?subset=main&split=test", 1),
    "math": SuiteDefaults("HuggingFaceH4/MATH-500?split=test", 4),
}
assert SUITE_DEFAULTS.keys() == set(SUITE_NAMES)


# Options of the harnesses that the run sets itself, and where they come from.
OTHER_KEYS: dict[str, dict[str, str]] = {
    "inspect": {
        "tasks": "evaluation.tasks",
        "model": "the run",
        "limit": "evaluation.limit",
        "log_dir": "the run",
        "log_format": "the run",
    },
    "lm-eval": {
        "tasks": "evaluation.tasks",
        "model": "the run",
        "limit": "evaluation.limit",
        "task_manager": "include_path",
        "log_samples": "the run",
    },
}


def _as_names(value: Any) -> Any:
    """Split `aime,gpqa` at its commas."""
    return (
        [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    )


class EvaluationConfig(Section):
    """`evaluation`: suites of `megaverl eval`, and tasks of other harnesses."""

    suites: Annotated[list[SuiteName], BeforeValidator(_as_names)] = []
    """Published data sets to evaluate on, such as [aime, gpqa]. Also --suite aime,gpqa. Without suites and tasks:
    data.validation with the rewards of `reward`."""
    data: dict[SuiteName, Text] = {}
    """Where a suite's rows are, by suite: a file (JSONL, Parquet, CSV), a folder, or a data set on the hub as
    org/name?subset=NAME&split=NAME&revision=COMMIT. Columns are read as published. Others: the data set on the hub
    for which results are usually quoted (docs/evaluation.md)."""
    samples: dict[SuiteName, Several] = {}
    """Responses per prompt, by suite. Others: aime 32; gpqa, math and code 4; gsm8k 1."""
    limit: Positive | None = None
    """Use only this many rows of each suite, from the start."""
    pass_at: list[Positive] = []
    """Further values of k for which pass@k is reported, beside the number of samples."""
    options: dict[SuiteName, dict[str, Any]] = {}
    """Options of a suite's reward that differ from its defaults, by suite, such as {code: {time_factor: 5}}."""
    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.95
    """Probability with which an interval covers the true mean."""
    tasks: Annotated[list[Text], BeforeValidator(_as_names)] = []
    """Tasks of other harnesses, each as inspect:TASK or lm-eval:TASK, such as [inspect:my_task.py@my_task,
    lm-eval:gsm8k]. Also --harness NAME --task TASK. `megaverl train` evaluates them at every validation."""
    harness_options: dict[HarnessName, dict[str, Any]] = {}
    """Options of a harness, by harness: arguments of inspect_ai.eval, such as {inspect: {epochs: 4}}, and of
    lm_eval.simple_evaluate, such as {lm-eval: {num_fewshot: 5, include_path: my_tasks}}."""
    harness_python: Text | None = None
    """Python interpreter that has the harnesses, if they are installed in another environment."""
    harness_minutes: Minutes = 60.0
    """Time after which a harness's process is ended, for each task."""

    @rule
    def check_pass_at(self, at: str) -> Issues:
        """Refuse a pass@k of more samples than a suite draws."""
        for name in self.suites:
            num_samples = self.num_samples(name)
            if any(k > num_samples for k in self.pass_at):
                text = f"found {yaml_text(self.pass_at)}; pass@k needs k samples, and {name} draws {num_samples}. Raise"
                yield ConfigIssue(
                    f"{at}.pass_at",
                    f"{text} {at}.samples.{name}.",
                    involves=(f"{at}.samples",),
                )

    @rule
    def check_data(self, at: str) -> Issues:
        """Refuse options of a source that do not exist."""
        for name, text in self.data.items():
            unknown = [key for key, _ in _options_of(text) if key not in DATA_OPTIONS]
            if unknown:
                text = f"found the option {unknown[0]!r}; there are {', '.join(DATA_OPTIONS)}."
                yield ConfigIssue(f"{at}.data.{name}", text)

    @rule
    def check_tasks(self, at: str) -> Issues:
        """Refuse tasks of no harness, tasks that are named twice, and options that the harness gets otherwise."""
        for index, text in enumerate(self.tasks):
            try:
                HarnessTask.parse(text)
            except ValueError as error:
                yield ConfigIssue(
                    f"{at}.tasks.{index}", f"found {yaml_text(text)}; {error}."
                )
            if text in self.tasks[:index]:
                yield ConfigIssue(
                    f"{at}.tasks.{index}", f"found {yaml_text(text)} twice."
                )
        for name, options in self.harness_options.items():
            for option in sorted({*options} & {*OTHER_KEYS[name]}):
                yield ConfigIssue(
                    f"{at}.harness_options.{name}.{option}",
                    f"is set by {OTHER_KEYS[name][option]}.",
                )

    @property
    def has_sets(self) -> bool:
        """Return whether `megaverl eval` evaluates suites or tasks, and not `data.validation`."""
        return bool(self.suites or self.tasks)

    @property
    def harness_tasks(self) -> list[HarnessTask]:
        """Return the tasks of other harnesses."""
        return [HarnessTask.parse(text) for text in self.tasks]

    def options_of(self, harness: str) -> dict[str, Any]:
        """Return the options of a harness."""
        return dict({**self.harness_options}.get(harness, {}))  # type: ignore[call-overload]

    def num_samples(self, suite: str) -> int:
        """Return the number of responses that are drawn for each prompt of a suite."""
        return dict(self.samples).get(suite, SUITE_DEFAULTS[suite].samples)  # type: ignore[call-overload, no-any-return]

    def source(self, suite: str, seed: int) -> str:
        """Return the source of a suite's prompts, in the form of `data.validation`.

        Args:
            seed: seed of the order of a question's options.
        """
        text = dict(self.data).get(suite, SUITE_DEFAULTS[suite].data)  # type: ignore[call-overload]
        options: dict[str, Any] = {
            "path": text.partition("?")[0],
            **dict(_options_of(text)),
            "seed": seed,
        }
        if self.limit is not None:
            options["limit"] = self.limit
        return f"{SUITE_PREFIX}{suite}?{urlencode(options)}"


def _options_of(text: str) -> list[tuple[str, str]]:
    """Return the options after the question mark of a source."""
    return parse_qsl(text.partition("?")[2], keep_blank_values=True)


class SuiteSource(NamedTuple):
    """Parsed form of a source `suite:NAME?...`. `options` are fields of SourceConfig, but for `seed`."""

    name: str
    path: str
    options: dict[str, Any]
    seed: int


def parse_suite_source(text: str) -> SuiteSource:
    """Parse `suite:NAME?path=PATH&split=SPLIT&...`. Without a path, the suite's default data set is meant.

    Raises:
        ValueError: the text does not have this form; says what is wrong.
    """
    name, _, query = text.removeprefix(SUITE_PREFIX).partition("?")
    if name not in SUITE_NAMES:
        raise ValueError(
            f"there is no suite {name!r}; there are {', '.join(SUITE_NAMES)}"
        )
    options: dict[str, Any] = dict(parse_qsl(query, keep_blank_values=True))
    if unknown := [key for key in options if key not in SUITE_OPTIONS]:
        raise ValueError(
            f"there is no option {unknown[0]!r}; there are {', '.join(SUITE_OPTIONS)}"
        )
    if "path" not in options:
        default = SUITE_DEFAULTS[name].data
        options = {
            "path": default.partition("?")[0],
            **dict(_options_of(default)),
            **options,
        }
    for key in ("limit", "seed"):
        if key in options:
            if not options[key].isdecimal():
                raise ValueError(f"{key} is {options[key]!r}; expected a whole number")
            options[key] = int(options[key])
    path = options.pop("path")
    seed = options.pop("seed", 0)
    return SuiteSource(name, path, options, seed)
