"""Settings that observe a run: `run.profile`, `alerts`, and the parser for alert conditions such as "disk < 5 GB"."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from shutil import which
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple
from urllib.parse import urlsplit

from pydantic import BeforeValidator

from megaverl.config.errors import ConfigIssue, yaml_text
from megaverl.config.section import AS_LIST, NonNegative, Positive, Section, Text

if TYPE_CHECKING:
    from megaverl.config.schema import Config

# A single integer is accepted in place of a list: `run.profile.steps: 5`.
Numbers = BeforeValidator(lambda value: [value] if isinstance(value, int) and not isinstance(value, bool) else value)


class ProfileConfig(Section):
    """`run.profile`: records of chosen steps, for `megaverl trace`."""

    steps: Annotated[list[Positive], Numbers] = []
    """Steps to profile, counted from 1. Empty: none; profiling then costs nothing."""
    ranks: Annotated[list[NonNegative] | None, Numbers] = None
    """Ranks to profile. null: all."""
    tools: Annotated[list[Literal["torch", "memory", "nvtx", "cuda", "py_spy"]], AS_LIST] = ["torch"]
    """Profilers. torch: operators and kernels (torch.profiler). py_spy: Python stacks (needs py-spy). On GPUs also
    memory: every allocation; nvtx: stages as ranges; cuda: cudaProfilerStart and Stop, for nsys with
    --capture-range=cudaProfilerApi."""
    record_shapes: bool = False
    """With torch: record the shapes of operator inputs."""
    with_stack: bool = False
    """With torch: record the Python lines that call operators. Slow."""
    profile_memory: bool = False
    """With torch: record the memory that operators allocate."""


class AlertConfig(Section):
    """One entry of `alerts`: a condition to watch.

    It is reported once when it starts to hold, and again only after it stopped holding.
    """

    when: Text
    """Condition. METRIC < NUMBER (also <=, >, >=) or METRIC is nan (NaN or infinite), optionally followed by `for N`:
    in N consecutive records. METRIC is a name in metrics.jsonl or a pattern such as */loss. Or stalled for 10 min (no
    step for that long; s, min, h). Or disk < 5 GB (free space at the run's folder)."""
    post: Text | None = None
    """URL that receives a POST of JSON: run, when, step, value, and text, as Slack reads it. $NAME: read the URL from
    that environment variable. null: report only on the console and in the logs."""


class Condition(NamedTuple):
    """Parsed form of an alert's `when`.

    Attributes:
        metric: name or pattern of metrics, "stalled", or "disk".
        sign: <, <=, >, >= or nan. For "stalled" always >=.
        value: threshold. Seconds for "stalled", bytes for "disk".
        records: number of consecutive records that must satisfy the condition.
    """

    metric: str
    sign: str
    value: float
    records: int = 1

    @property
    def is_of_metrics(self) -> bool:
        """Return whether the condition is about recorded metrics, not about stalling or disk space."""
        return self.metric not in ("stalled", "disk")

    def holds(self, value: float) -> bool:
        """Return whether `value` satisfies the condition.

        NaN satisfies no comparison except `is nan`, which also matches infinities.
        """
        if self.sign == "nan":
            # `not <` instead of `>=`: it is true for NaN as well as for both infinities.
            return not abs(value) < float("inf")
        return {
            "<": value < self.value,
            "<=": value <= self.value,
            ">": value > self.value,
            ">=": value >= self.value,
        }[self.sign]


_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_BYTES = {"MB": 1e6, "GB": 1e9, "TB": 1e12}
_METRIC = re.compile(
    rf"(?P<metric>[\w./@*?-]+)\s*(?:(?P<sign><=|>=|<|>)\s*(?P<value>{_NUMBER})|is\s+nan)(?:\s+for\s+(?P<records>\d+))?"
)
_STALLED = re.compile(rf"stalled\s+for\s+(?P<value>{_NUMBER})\s*(?P<unit>{'|'.join(_SECONDS)})")
_DISK = re.compile(rf"disk\s*(?P<sign><=|<)\s*(?P<value>{_NUMBER})\s*(?P<unit>{'|'.join(_BYTES)})")
EXAMPLES = '"reward/mean < 0.1 for 20", "*/loss is nan", "stalled for 10 min", "disk < 5 GB"'


def read_condition(text: str) -> Condition:
    """Parse the text of `alerts.N.when`. The text is matched by patterns and never evaluated as code.

    Raises:
        ValueError: the text has none of the known forms.
    """
    text = text.strip()
    if (match := _STALLED.fullmatch(text)) and float(match["value"]) > 0:
        return Condition("stalled", ">=", float(match["value"]) * _SECONDS[match["unit"]])
    if match := _DISK.fullmatch(text):
        return Condition("disk", match["sign"], float(match["value"]) * _BYTES[match["unit"]])
    match = _METRIC.fullmatch(text)
    if match is None or match["metric"] in ("stalled", "disk") or match["records"] == "0":
        raise ValueError(f"expected something like {EXAMPLES}")
    if match["sign"] is None:
        return Condition(match["metric"], "nan", 0.0, int(match["records"] or 1))
    return Condition(match["metric"], match["sign"], float(match["value"]), int(match["records"] or 1))


def post_address(post: str) -> str:
    """Return the URL for an alert's `post`. `$NAME` is read from the environment and gives "" if it is not set."""
    return os.environ.get(post[1:], "") if post.startswith("$") else post


def watching_mistakes(config: Config, command: str, world_size: int | None) -> Iterator[ConfigIssue]:
    """Yield mistakes in `alerts` and `run.profile`, such as unreadable conditions or ranks that do not exist."""
    profile = config.run.profile
    planned = {"sft": config.sft.steps, "dpo": config.preference.steps, "reward": config.preference.steps}
    steps = planned.get(command, config.trainer.steps)
    for number, alert in enumerate(config.alerts):
        try:
            read_condition(alert.when)
        except ValueError as error:
            yield ConfigIssue(f"alerts.{number}.when", f"found {yaml_text(alert.when)}; {error}.")
        if alert.post is None:
            continue
        address = urlsplit(post_address(alert.post))
        if alert.post.startswith("$") and not post_address(alert.post):
            yield ConfigIssue(f"alerts.{number}.post", f"found {yaml_text(alert.post)}, which is not set. Export it.")
        elif address.scheme not in ("http", "https") or not address.hostname:
            what = yaml_text(alert.post) if not alert.post.startswith("$") else f"what {alert.post} holds"
            yield ConfigIssue(f"alerts.{number}.post", f"found {what}; expected http://... or https://...")
    if late := [step for step in profile.steps if step > steps]:
        yield ConfigIssue("run.profile.steps", f"found {yaml_text(late)}; the run has {steps} steps.")
    if world_size is not None and (far := [rank for rank in profile.ranks or () if rank >= world_size]):
        yield ConfigIssue("run.profile.ranks", f"found {yaml_text(far)}; the ranks are 0 to {world_size - 1}.")
    if profile.steps and config.trainer.rollout_only:
        yield ConfigIssue("run.profile.steps", "is set, and trainer.rollout_only trains no step. Leave it out.")
    if "py_spy" in profile.tools and profile.steps and py_spy() is None:
        yield ConfigIssue("run.profile.tools", "py_spy is not installed: pip install 'megaverl[profile]'.")


def py_spy() -> str | None:
    """Return the path of the py-spy command, or None. Looks beside this interpreter first, then on PATH."""
    beside_python = os.path.dirname(sys.executable)
    search_path = os.pathsep.join([beside_python, os.environ.get("PATH", "")])
    return which("py-spy", path=search_path)
