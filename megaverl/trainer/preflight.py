"""Checks of a run before its ranks start, for the command line and for Python programs.

`load_config` has already checked the configuration. These functions check the machine,
and the checkpoint that the run resumes from, without heavy imports. Ranks that torchrun
started check their code and data here as well.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from megaverl.config import Config
from megaverl.config.errors import ConfigIssue, InvalidConfig
from megaverl.config.field_needs import FieldMachine, need_mistakes, without_repeats
from megaverl.config.files_and_packages import package_issues
from megaverl.config.grids import megatron_sections, used_roles
from megaverl.config.roles import GridConfig
from megaverl.config.run import is_hub_name
from megaverl.config.wording import listed
from megaverl.errors import ConfigError, ModelError, RolloutError
from megaverl.gpus import (
    cuda_builds_beside_cpu_torch,
    has_usable_gpu,
    is_processor_meant,
    unusable_gpus,
)
from megaverl.models.hub_lookup import missing_models
from megaverl.rank_environment import Work, prepare_rank
from megaverl.rollout.cpu_kernels import why_no_kernel
from megaverl.rollout.cpu_limits import (
    check_delta_net_runs_here,
    check_runs_here,
    speculation_here,
)
from megaverl.sharding.model_spec import ModelSpec
from megaverl.trainer.code_checks import Preflight, preflight
from megaverl.trainer.resuming import check_resume
from megaverl.trainer.trial_build import try_roles
from megaverl.user_code import describe

if TYPE_CHECKING:
    import torch.distributed as dist

# Marks ranks whose code and data the starting command has checked, or was told not to
# check.
CHECKED = "_MEGAVERL_CHECKED"
GENERATES = ("train", "eval", "generate", "quickstart", "tinker")


def prepare_environment(config: Config, command: str) -> None:
    """Set the environment variables of this rank.

    This must run before torch is imported, because torch and CUDA read their variables
    only once.
    """
    roles = [getattr(config, role, None) for role in used_roles(config, command)]
    models = [role for role in roles if isinstance(role, GridConfig)]
    optimizers = [getattr(role, "optimizer", {}) for role in models]
    work = Work(
        engines=frozenset(role.engine for role in models),
        generates=command in GENERATES and config.rollout.engine == "vllm",
        steps_on_cpu=any(
            optimizer.get("optimizer_cpu_offload") for optimizer in optimizers
        ),
    )
    prepare_rank(os.environ, work)


def check_builds() -> None:
    """Refuse an environment in which importing models fails.

    Raises:
        ConfigError: CUDA builds of packages are installed next to a CPU build of torch.
    """
    if foreign := cuda_builds_beside_cpu_torch():
        raise ConfigError(
            f"{', '.join(foreign)}: these are CUDA builds, but torch is a CPU build: importing models fails. "
            f"Run: pip uninstall -y {' '.join(package.split()[0] for package in foreign)} (megaverl does not need them)"
        )


def check_packages(config: Config, command: str) -> None:
    """Refuse a run whose packages are not installed.

    Raises:
        InvalidConfig: lists the missing packages and how to install them.
    """
    if mistakes := list(package_issues(config, command)):
        raise InvalidConfig(mistakes, "packages")


def generates_with_vllm(config: Config, command: str) -> bool:
    """Return whether the command runs vLLM engines in its own processes."""
    is_replayed = config.trainer.replay_rollouts is not None
    return command in GENERATES and config.rollout.engine == "vllm" and not is_replayed


def head_size_mistakes(config: Config, command: str) -> Iterator[ConfigIssue]:
    """Yield an issue if vLLM has no CPU kernel for the model's head size, on a machine without a GPU."""
    spec = _outline(config)
    if spec is None or has_usable_gpu() or not generates_with_vllm(config, command):
        return
    if reason := why_no_kernel(spec.head_dim):
        yield ConfigIssue("model.path", reason)


def engine_mistakes_here(config: Config, command: str) -> Iterator[ConfigIssue]:
    """Yield an issue if vLLM's CPU build does not support the engine's fields, on a machine without a GPU."""
    if has_usable_gpu() or not generates_with_vllm(config, command):
        return
    spec = _outline(config)
    fields = config.rollout.vllm
    try:
        check_runs_here(
            {"enforce_eager": True, **fields},
            experts=spec is not None and spec.moe is not None,
            is_recurrent=spec is not None and spec.is_recurrent,
            has_gates=spec is None or spec.is_gated,
        )
        if spec is not None and spec.delta_net is not None:
            check_delta_net_runs_here(spec.delta_net, config.model.dtype)
        if speculative := fields.get("speculative_config"):
            method = speculative.get("method") or (
                "draft_model" if speculative.get("model") else ""
            )
            speculation_here({**speculative, "method": method})
    except RolloutError as error:
        key, mark, rest = re.split("([=:])", str(error), maxsplit=1)
        yield ConfigIssue(key, f"found {rest}" if mark == "=" else rest.strip())


def _outline(config: Config) -> ModelSpec | None:
    """Return the model's dimensions, or None if its config.json is not on this machine or not readable."""
    path = config.model.path
    if is_hub_name(path) or not (Path(path) / "config.json").is_file():
        return None
    try:
        return ModelSpec.outline(path)
    except ModelError:
        return None  # the configuration's own check reports this better


def field_mistakes_on(
    config: Config, command: str, machine: FieldMachine
) -> Iterator[ConfigIssue]:
    """Yield an issue for each requirement of megatron-core's fields that this machine does not meet.

    Only the roles that `command` builds are checked.
    """
    for role, parts in without_repeats(megatron_sections(config, command)).items():
        yield from need_mistakes(role, parts, machine)


def check_fields(
    config: Config, command: str, *, dry_run: bool = False, with_trials: bool = True
) -> list[str]:
    """Check that this machine supports the fields that are passed to megatron-core and vLLM.

    A dry run on a machine without a GPU may be meant for another machine, unless
    CUDA_VISIBLE_DEVICES selects the CPU. Its issues are then returned as notes instead
    of being raised.

    Args:
        with_trials: also build small models in child processes.

    Returns:
        Notes for the terminal.

    Raises:
        InvalidConfig: lists the fields that this machine does not support.
    """
    issues = [
        *head_size_mistakes(config, command),
        *engine_mistakes_here(config, command),
    ]
    issues += field_mistakes_on(config, command, FieldMachine.here())
    notes = []
    if with_trials and not issues and _outline(config) is not None:
        tried = try_roles(
            config, command, generates=generates_with_vllm(config, command)
        )
        issues += tried.issues
        notes += [
            f"not certain before ranks start: {setting}" for setting in tried.not_tried
        ]
    if not issues:
        return notes
    if not dry_run or has_usable_gpu() or is_processor_meant():
        raise InvalidConfig(issues, "what this machine can compute")
    return [
        f"{issue.key}: {issue.message} A run on this machine would be refused; one on another machine may not be."
        for issue in issues
    ]


def check_models(config: Config, *, on_this_machine: bool = True) -> None:
    """Refuse models that are neither on this machine nor on the hub.

    Args:
        on_this_machine: whether the run starts on this machine. If not, an unreachable hub is not an error.

    Raises:
        InvalidConfig: lists the missing models.
    """
    if issues := missing_models(config, on_this_machine=on_this_machine):
        raise InvalidConfig(issues, "models that it names")


def check_dry_run(config: Config, command: str, *, with_files: bool) -> str:
    """Run the checks of a dry run. Return a warning, or an empty string.

    A dry run may be of a recipe for another machine, so builds and GPUs of this machine
    are not errors.

    Args:
        with_files: whether the folders of the model and the run are on this machine.

    Raises:
        ConfigError: says what is wrong and what to do.
    """
    if with_files:
        check_models(config, on_this_machine=False)
        check_resume(config, command)
    return unusable_gpus() or ""


def check_code_and_data(config: Config, command: str) -> Preflight:
    """Load the code that the configuration names and read some rows. User code runs in child processes.

    Raises:
        InvalidConfig: lists what is wrong.
    """
    checked = preflight(config, command)
    if checked.issues:
        raise InvalidConfig(checked.issues, "code and data that it names")
    return checked


def check_in_ranks(config: Config, command: str, group: dist.ProcessGroup) -> None:
    """Check code and rows once on each node, unless the starting command has done so. Collective over all ranks.

    Ranks that torchrun started have not been checked. Files may be on each machine's
    own disk, so the first rank of every node checks them. All ranks then raise the same
    error before any model is built.

    Args:
        group: all ranks of the job, with communication in host memory.

    Raises:
        InvalidConfig: lists what is wrong, with the node if it is not wrong on all of them.
    """
    # Removed after reading, so that a run which user code starts from here is checked
    # again.
    if os.environ.pop(CHECKED, ""):
        return
    report: dict[str, Any] | None = None
    if os.environ.get("LOCAL_RANK", "0") == "0":
        # Report any exception, because the other ranks wait for this rank.
        try:
            issues = preflight(config, command).issues
        except Exception as error:
            problem = f"its code and data cannot be checked: {describe(error)}."
            issues = [ConfigIssue("run", problem)]
        report = {"host": socket.gethostname(), "issues": list(map(asdict, issues))}
    # Imported here because it imports torch, which only ranks need.
    from megaverl.distributed.collectives import reduce_json

    merged = reduce_json(report, _merge_reports, group)
    if merged:
        mistakes = msgspec.convert(merged, list[ConfigIssue])
        raise InvalidConfig(mistakes, "code and data that it names")


def _merge_reports(reports: list[dict[str, Any] | None]) -> list[dict[str, Any]]:
    """Return the issues of all nodes without duplicates. An issue of only some nodes names these nodes."""
    of_nodes = [report for report in reports if report is not None]
    issues: dict[str, dict[str, Any]] = {}
    hosts: dict[str, list[str]] = {}
    for report in of_nodes:
        for issue in report["issues"]:
            name = f"{issue['key']} {issue['message']}"
            issues.setdefault(name, issue)
            hosts.setdefault(name, []).append(report["host"])
    for name, issue in issues.items():
        if len(hosts[name]) < len(of_nodes):
            issue["message"] += f" (on {listed(hosts[name], most=8)})"
    return list(issues.values())


def check_before_ranks(config: Config, command: str, *, is_rank: bool = False) -> str:
    """Run all checks that are possible before the ranks of a run start. Return a warning, or an empty string.

    Args:
        is_rank: whether this process is a rank. All ranks get the same result, and compare settings with the checkpoint
            collectively later.

    Raises:
        ConfigError: says what is wrong and what to do.
    """
    check_builds()
    check_packages(config, command)
    if not is_rank:
        check_models(config)
        check_resume(config, command)
    why_unusable = unusable_gpus()
    if why_unusable and command != "quickstart":  # quickstart's model is tiny
        raise ConfigError(why_unusable)
    return why_unusable or ""
