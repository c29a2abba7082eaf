"""`scheduler`: what megatron-core's OptimizerParamScheduler would refuse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megaverl.config.errors import ConfigIssue, did_you_mean, found, listed
from megaverl.config.roles import ActorConfig, CriticConfig

DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WSD_STYLES = ("linear", "cosine", "exponential", "minus_sqrt")
WEIGHT_DECAY_STYLES = ("constant", "linear", "cosine")

TrainedRole = ActorConfig | CriticConfig


def scheduler_mistakes(name: str, role: TrainedRole, num_updates: int) -> Iterator[ConfigIssue]:
    """What it would refuse by an assertion; `num_updates` optimizer steps make the run."""
    at, scheduler = f"{name}.scheduler", role.scheduler
    for key, allowed in (
        ("lr_decay_style", DECAY_STYLES),
        ("lr_wsd_decay_style", WSD_STYLES),
        ("wd_incr_style", WEIGHT_DECAY_STYLES),
    ):
        style = scheduler.get(key)
        if style is not None and style not in allowed:
            hint = did_you_mean(style, allowed) if isinstance(style, str) else ""
            yield ConfigIssue(f"{at}.{key}", f"found {found(style)}; allowed: {listed(allowed)}.{hint}")
    if any(not _is_count(scheduler.get(key, 0)) for key in ("lr_warmup_steps", "lr_decay_steps")):
        yield ConfigIssue(at, "lr_warmup_steps and lr_decay_steps must be integers of at least 0.")
        return
    warmup, decay = scheduler.get("lr_warmup_steps", 0), scheduler.get("lr_decay_steps", num_updates)
    if warmup and warmup >= decay:
        source = "lr_decay_steps" if "lr_decay_steps" in scheduler else "the run's optimizer steps"
        yield ConfigIssue(
            f"{at}.lr_warmup_steps",
            f"found {warmup}; expected below {source}, {decay}.",
            involves=("trainer.steps",),
        )
    if scheduler.get("lr_decay_style") == "WSD":
        missing = [key for key in ("wsd_decay_steps", "lr_wsd_decay_style") if scheduler.get(key) is None]
        if missing:
            yield ConfigIssue(at, f"lr_decay_style WSD needs {listed(missing)}.")
    start, end = (scheduler.get(key, role.optimizer.get("weight_decay", 0.0)) for key in ("start_wd", "end_wd"))
    if start != end and scheduler.get("wd_incr_style", "constant") == "constant":
        yield ConfigIssue(f"{at}.wd_incr_style", f"found constant, but start_wd={start} and end_wd={end} differ.")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
