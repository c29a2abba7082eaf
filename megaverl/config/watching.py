"""Settings that observe a run: `run.profile`, `alerts`, and the parser for alert conditions such as "disk < 5 GB"."""

from __future__ import annotations

import os
import re
import sys
from shutil import which
from typing import Annotated, Literal, NamedTuple
from urllib.parse import urlsplit

from pydantic import BeforeValidator

from megaverl.config.errors import ConfigIssue
from megaverl.config.section import (
    AS_LIST,
    Issues,
    NonNegative,
    Positive,
    Section,
    Text,
    rule,
)
from megaverl.config.wording import yaml_text

# A single integer is accepted in place of a list: `run.profile.steps: 5`.
Numbers = BeforeValidator(
    lambda value: (
        [value] if isinstance(value, int) and not isinstance(value, bool) else value
    )
)


class ProfileConfig(Section):
    """`run.profile`: records of chosen steps, for `megaverl trace`."""

    steps: Annotated[list[Positive], Numbers] = []
    """Steps to profile, counted from 1. Empty: none; profiling then costs nothing."""
    ranks: Annotated[list[NonNegative] | None, Numbers] = None
    """Ranks to profile. null: all."""
    tools: Annotated[
        list[Literal["torch", "memory", "nvtx", "cuda", "py_spy"]], AS_LIST
    ] = ["torch"]
    """Profilers. torch: operators and kernels (torch.profiler). py_spy: Python stacks (needs py-spy). On GPUs also
    memory: every allocation; nvtx: stages as ranges; cuda: cudaProfilerStart and Stop, for nsys with
    --capture-range=cudaProfilerApi."""
    record_shapes: bool = False
    """With torch: record the shapes of operator inputs."""
    with_stack: bool = False
    """With torch: record the Python lines that call operators. Slow."""
    profile_memory: bool = False
    """With torch: record the memory that operators allocate."""

    @rule
    def check_tools(self, at: str) -> Issues:
        """Refuse a profiler that is not installed."""
        if "py_spy" in self.tools and self.steps and py_spy() is None:
            yield ConfigIssue(
                f"{at}.tools",
                "py_spy is not installed: pip install 'megaverl[profile]'.",
            )


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

    @rule
    def check_condition(self, at: str) -> Issues:
        """Refuse a condition that cannot be read."""
        try:
            read_condition(self.when)
        except ValueError as error:
            yield ConfigIssue(f"{at}.when", f"found {yaml_text(self.when)}; {error}.")

    @rule
    def check_address(self, at: str) -> Issues:
        """Refuse an address that is no URL, and one in a variable that is not set."""
        if self.post is None:
            return
        is_variable = self.post.startswith("$")
        url = post_address(self.post)
        address = urlsplit(url)
        if is_variable and not url:
            yield ConfigIssue(
                f"{at}.post",
                f"found {yaml_text(self.post)}, which is not set. Export it.",
            )
        elif address.scheme not in ("http", "https") or not address.hostname:
            shown = f"what {self.post} holds" if is_variable else yaml_text(self.post)
            yield ConfigIssue(
                f"{at}.post", f"found {shown}; expected http://... or https://..."
            )


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
            # `not <` instead of `>=`: it is true for NaN as well as for both
            # infinities.
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
_STALLED = re.compile(
    rf"stalled\s+for\s+(?P<value>{_NUMBER})\s*(?P<unit>{'|'.join(_SECONDS)})"
)
_DISK = re.compile(
    rf"disk\s*(?P<sign><=|<)\s*(?P<value>{_NUMBER})\s*(?P<unit>{'|'.join(_BYTES)})"
)
EXAMPLES = (
    '"reward/mean < 0.1 for 20", "*/loss is nan", "stalled for 10 min", "disk < 5 GB"'
)


def read_condition(text: str) -> Condition:
    """Parse the text of `alerts.N.when`. The text is matched by patterns and never evaluated as code.

    Raises:
        ValueError: the text has none of the known forms.
    """
    text = text.strip()
    if (match := _STALLED.fullmatch(text)) and float(match["value"]) > 0:
        return Condition(
            "stalled", ">=", float(match["value"]) * _SECONDS[match["unit"]]
        )
    if match := _DISK.fullmatch(text):
        return Condition(
            "disk", match["sign"], float(match["value"]) * _BYTES[match["unit"]]
        )
    match = _METRIC.fullmatch(text)
    if (
        match is None
        or match["metric"] in ("stalled", "disk")
        or match["records"] == "0"
    ):
        raise ValueError(f"expected something like {EXAMPLES}")
    if match["sign"] is None:
        return Condition(match["metric"], "nan", 0.0, int(match["records"] or 1))
    return Condition(
        match["metric"],
        match["sign"],
        float(match["value"]),
        int(match["records"] or 1),
    )


def post_address(setting: str) -> str:
    """Return the URL for an alert's `setting`. `$NAME` is read from the environment and gives "" if it is not set."""
    return os.environ.get(setting[1:], "") if setting.startswith("$") else setting


def py_spy() -> str | None:
    """Return the path of the py-spy command, or None. Looks beside this interpreter first, then on PATH."""
    beside_python = os.path.dirname(sys.executable)
    search_path = os.pathsep.join([beside_python, os.environ.get("PATH", "")])
    return which("py-spy", path=search_path)
