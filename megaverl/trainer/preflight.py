"""What is checked of a run before any rank starts, for the command line and for Python programs alike.

`load_config` has checked the configuration by then. Here the machine is looked at, and the checkpoint that the run goes
on from. Nothing heavy is imported. Ranks that torchrun has started check their code and data here too.
"""

from __future__ import annotations

import os
import socket
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaverl.config import Config
from megaverl.config.checks import package_mistakes
from megaverl.config.errors import ConfigIssue, InvalidConfig, listed
from megaverl.config.run import is_hub_name
from megaverl.errors import ConfigError, ModelError
from megaverl.gpus import count_gpus, cuda_builds_beside_cpu_torch, unusable_gpus
from megaverl.rollout.cpu_kernels import why_no_kernel
from megaverl.sharding.model_spec import ModelSpec
from megaverl.trainer.code_checks import Preflight, preflight
from megaverl.trainer.resuming import check_resume
from megaverl.user_code import describe

if TYPE_CHECKING:
    import torch.distributed as dist

# Set for ranks whose code and data the command that starts them has checked, or was told not to check.
CHECKED = "_MEGAVERL_CHECKED"
GENERATES = ("train", "eval", "generate", "quickstart")


def check_builds() -> None:
    """Refuse an environment in which importing models fails.

    Raises:
        ConfigError: packages that are built for CUDA beside a torch for the processor.
    """
    if foreign := cuda_builds_beside_cpu_torch():
        raise ConfigError(
            f"{', '.join(foreign)}: built for CUDA, beside a torch for the processor: importing models fails with "
            f"them. pip uninstall -y {' '.join(each.split()[0] for each in foreign)} (nothing here needs them)"
        )


def check_packages(config: Config, command: str) -> None:
    """Refuse a run whose packages are not installed.

    Raises:
        ConfigError: says which are missing, and how to install them.
    """
    if mistakes := list(package_mistakes(config, command)):
        raise InvalidConfig(mistakes, "packages")


def check_head_size(config: Config, command: str) -> None:
    """Refuse a model that vLLM cannot generate with on this machine's processor.

    Raises:
        ConfigError: no kernel for its head size.
    """
    path = config.model.path
    generates = command in GENERATES and config.rollout.engine == "vllm" and config.trainer.replay_rollouts is None
    if not generates or count_gpus() or is_hub_name(path) or not (Path(path) / "config.json").is_file():
        return
    try:
        head_dim = ModelSpec.outline(path).head_dim
    except ModelError:
        return  # the configuration's own check has a better message
    if why := why_no_kernel(head_dim):
        raise InvalidConfig([ConfigIssue("model.path", why)], path)


def check_dry_run(config: Config, command: str, *, with_files: bool) -> str:
    """Check what a dry run looks at; return a warning, or nothing.

    A dry run may be of a recipe for another machine, so builds and GPUs of this one are no mistake.

    Args:
        with_files: the model's and the run's folders are those of this machine.

    Raises:
        ConfigError: what is wrong, and what to do.
    """
    if with_files:
        check_head_size(config, command)
        check_resume(config, command)
    return unusable_gpus() or ""


def check_code_and_data(config: Config, command: str) -> Preflight:
    """Load what the configuration names and read some rows, outside of this process where that runs others' code.

    Raises:
        InvalidConfig: lists what is wrong.
    """
    checked = preflight(config, command)
    if checked.issues:
        raise InvalidConfig(checked.issues, "code and data that it names")
    return checked


def check_in_ranks(config: Config, command: str, group: dist.ProcessGroup) -> None:
    """Check code and rows once on each node, unless the command that started the ranks has done it. Collective.

    Ranks that torchrun has started come here unchecked. The files may lie on each machine's own disk, so the first rank
    of every node looks. All ranks then raise the same error, before any model is built.

    Args:
        group: of all ranks of the job, in host memory.

    Raises:
        InvalidConfig: lists what is wrong, with the node where it is not wrong on all of them.
    """
    if os.environ.pop(CHECKED, ""):  # read once: a run that user code starts from here is another one
        return
    mine: dict[str, Any] | None = None
    if os.environ.get("LOCAL_RANK", "0") == "0":
        # Whatever happens is reported: the other ranks wait for this one.
        try:
            issues = [asdict(issue) for issue in preflight(config, command).issues]
        except Exception as error:
            issues = [asdict(ConfigIssue("run", f"its code and data cannot be checked: {describe(error)}."))]
        mine = {"host": socket.gethostname(), "issues": issues}
    from megaverl.distributed.collectives import reduce_json  # imports torch, which only ranks do

    merged = reduce_json(mine, _merge_reports, group)
    if merged:
        mistakes = [ConfigIssue(**{**issue, "involves": tuple(issue["involves"])}) for issue in merged]
        raise InvalidConfig(mistakes, "code and data that it names")


def _merge_reports(reports: list[dict[str, Any] | None]) -> list[dict[str, Any]]:
    """Return the issues of all nodes, each once; one that not all nodes have names those that do."""
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
    """Check all that can be known of a run before its ranks start; return a warning, or nothing.

    Args:
        is_rank: this process is one of the ranks. All of them come to the same; the checkpoint they read together.

    Raises:
        ConfigError: what is wrong, and what to do.
    """
    check_builds()
    check_packages(config, command)
    check_head_size(config, command)
    if not is_rank:
        check_resume(config, command)
    why_unusable = unusable_gpus()
    if why_unusable and command != "quickstart":  # whose model is tiny
        raise ConfigError(why_unusable)
    return why_unusable or ""
