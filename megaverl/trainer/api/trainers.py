"""`RLTrainer` and `PPOTrainer` for Python programs, on top of the trainer of `megaverl train`.

Under torchrun, a program joins the job as one of its ranks. Otherwise it is a job of
one process.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from megaverl.child_checks import refuse_in_a_check
from megaverl.config import Config, smallest_world
from megaverl.config.absolute import with_absolute_paths
from megaverl.config.errors import InvalidConfig
from megaverl.config.grids import is_placed, resolve_placement, role_grids, used_roles
from megaverl.config.yaml_source import Override
from megaverl.errors import INTERRUPTED, SAVED_AND_LEFT, ConfigError, TrainingStopped
from megaverl.processes import free_port
from megaverl.temporary import remove_temporary_folder
from megaverl.trainer.api.devices import DataParallelConfig, Devices, placement_of
from megaverl.trainer.api.settings import (
    JOB_OF_ONE,
    Description,
    Reward,
    TrainerConfig,
    as_overrides,
    as_started,
    name_python_setting,
    refuse_unknown,
    resolve,
)
from megaverl.trainer.preflight import (
    check_before_ranks,
    check_code_and_data,
    check_fields,
    check_in_ranks,
    prepare_environment,
)
from megaverl.user_code import describe, exits_fail

if TYPE_CHECKING:
    from megaverl.data.batch import RolloutBatch
    from megaverl.trainer.job import WatchedJob
    from megaverl.trainer.loop import Trainer
    from megaverl.trainer.stored_rollouts import StoredRollouts


class _Joined:
    """Job that this process has joined. There is at most one."""

    job: WatchedJob | None = None
    config: Config | None = None
    # Configurations whose code and data were checked.
    checked: ClassVar[list[Config]] = []


def under_torchrun() -> bool:
    """Return whether this process was started as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ and not JOB_OF_ONE


def init_distributed(config: Description) -> WatchedJob:
    """Join the job of this process: create the default process group, place the roles and monitor for lost ranks.

    Under torchrun every rank must call it. Otherwise the job is this process. A second
    call returns the same job, which has one placement.

    Args:
        config: configuration of the run, in any form that a trainer takes.

    Returns:
        The job, with `context` (placement and communication) and `connection` (to its controller).

    Raises:
        ConfigError: the configuration is invalid, or needs more ranks than the job has.
        TrainingStopped: ranks do not join in time, or another job uses the same address.
    """
    # Importing a program in a check must not start a job.
    refuse_in_a_check()
    resolved = resolve(config)
    _check(resolved, is_rank=under_torchrun())
    if not under_torchrun():
        needed = smallest_world(resolved)
        if needed > 1:
            raise ConfigError(
                f"this configuration needs {needed} ranks, but this process is a single one. Start the program with "
                f"torchrun --nproc-per-node {needed} PROGRAM.py"
            )
    if _Joined.job is not None and _Joined.config is not None:
        if resolved.placement != _Joined.config.placement:
            raise ConfigError(
                "placement: this program has joined its job with another one. Give all trainers the same."
            )
        _check_code(resolved, _Joined.job)
        return _Joined.job
    if not under_torchrun():
        # Stored, so that `as_started` can hide these variables from later trainers.
        JOB_OF_ONE.update(
            {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        )
        JOB_OF_ONE.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())})
        os.environ |= JOB_OF_ONE
    # For modules that are not imported yet. CUDA and NCCL must not have started.
    prepare_environment(resolved, "train")
    from megaverl.checkpoint.training_state import seed_generators
    from megaverl.dataflow.job import use_context
    from megaverl.monitoring.console import Console
    from megaverl.planner.placed_run import check_memory
    from megaverl.platform import platform
    from megaverl.trainer.job import join_job

    platform.start()
    _Joined.job = join_job(
        resolved, "train", Console(int(os.environ["RANK"])), check_memory
    )
    _Joined.config = resolved
    use_context(_Joined.job.context)
    seed_generators(resolved.run.seed)
    atexit.register(_leave)
    _check_code(resolved, _Joined.job)
    return _Joined.job


def _check_code(config: Config, job: WatchedJob) -> None:
    """Check code and data of a configuration once. Collective over all ranks.

    Raises:
        InvalidConfig: lists what is wrong.
    """
    if config in _Joined.checked:
        return
    job.connection.status("checking code and data")
    with _as_a_program():
        check_in_ranks(config, "train", job.context.control)
    _Joined.checked.append(config)


@contextmanager
def explained() -> Iterator[None]:
    """Convert errors of work with other ranks. If a rank is lost, the error says so instead of quoting gloo or NCCL.

    Raises:
        TrainingStopped: a rank was lost. The message says why.
        SystemExit: the run was asked to leave and has saved. The code is `errors.SAVED_AND_LEFT` if the program
            continues when it is started again, else `errors.INTERRUPTED`.
    """
    try:
        with exits_fail():
            yield
    except (Exception, SystemExit) as error:
        from megaverl.trainer.job import Leaving

        job = _Joined.job
        if isinstance(error, SystemExit):
            if isinstance(error.__cause__, Leaving):  # raised by a nested call
                raise
            # Code of a model or library called sys.exit. The program has not finished,
            # so it must not use that exit code.
            explanation = None if job is None else job.connection.explain(error)
            raise TrainingStopped(
                explanation or f"code inside the run raised {describe(error)}."
            ) from error
        if isinstance(error, Leaving):
            if job is None or job.context.rank == 0:
                print(error, file=sys.stderr, flush=True)
            raise SystemExit(error.code) from error
        if job is not None and (verdict := job.connection.explain(error)):
            raise TrainingStopped(verdict) from error
        raise


def _leave() -> None:
    """Leave the job together with the other ranks at the program's end, or report the error that ended the program."""
    import torch.distributed as dist

    from megaverl.distributed.collectives import barrier

    # Python sets `sys.last_value` when an uncaught exception ends the program.
    job, error = _Joined.job, getattr(sys, "last_value", None)
    if job is None:
        return
    if error is not None:
        job.connection.explain(error)
        return
    job.connection.status("the end of its program")
    try:
        barrier(job.context.control)
    except TrainingStopped as broken:
        print(
            f"error: {job.connection.explain(broken) or broken}",
            file=sys.stderr,
            flush=True,
        )
        remove_temporary_folder()
        os._exit(1)
    job.connection.leave()
    job.context.messages.close()
    dist.destroy_process_group()


# Short names of metrics that `update` returns as well. Each is the first of these
# metrics that was measured.
SHORT_NAMES = {
    "reward": ("reward/mean",),
    "loss": ("actor/loss",),
    "kl": ("train/kl", "actor/approx_kl"),
}


class RLTrainer:
    """Reinforcement learning from Python, equal to `megaverl train` with the same configuration.

    Args:
        config: a YAML file, a mapping, a TrainerConfig or a Config. None: only the keywords.
        reward_model: reward as in `reward_function`, or the folder of a model that scores responses.
        strategy: ranks of each role. `set_device_map` is an alternative.
        overrides: "key=value" as on the command line, with precedence over everything else.
        settings: fields of `TrainerConfig`, applied on top of `config`.

    Raises:
        ConfigError: lists every mistake, before anything is built.

    Example:
        trainer = RLTrainer(
            actor_model="models/small", reward_function="exact_match", train_data="train.jsonl", use_vllm=True
        )
        metrics = trainer.train()
    """

    def __init__(
        self,
        config: Description | None = None,
        *,
        reward_model: Reward | Path | None = None,
        strategy: RoleBasedDistributedStrategy | None = None,
        overrides: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        refuse_unknown(settings)
        more = _given(settings)
        if reward_model is not None:
            more.append(("reward", [_reward_of(reward_model)]))
        if strategy is not None:
            more += [
                f"placement.{key}={ranks}" for key, ranks in strategy.placement.items()
            ]
        self.config: Config = resolve(
            {} if config is None else config, [*more, *overrides]
        )
        self._loop: Trainer | None = None

    def train(self) -> dict[str, float]:
        """Run all steps, or the remaining steps of an earlier run in the same folder.

        Under torchrun this process is one of the ranks. Otherwise the run takes place
        in this process, or in child processes if the configuration needs several ranks.

        Returns:
            Metrics of the last validation, or else of the last step.

        Raises:
            TrainingStopped: a rank failed. Its message is on the terminal.
            SystemExit: the run was asked to leave and has saved; see `explained` for the code.
        """
        if not under_torchrun() and _num_ranks(self.config) > 1:
            return _train_in_ranks(self.config)
        with explained():
            return self.loop.train()

    @property
    def loop(self) -> Trainer:
        """Return the underlying trainer of this rank. It is created on first access."""
        if self._loop is None:
            self._loop = self._make_loop()
        return self._loop

    def _make_loop(self) -> Trainer:
        """Create the trainer of this run's folder."""
        # Relative paths must keep their meaning if the program changes its working
        # directory.
        self.config = with_absolute_paths(self.config)
        job = init_distributed(self.config)
        from megaverl.distributed.collectives import on_first_rank
        from megaverl.monitoring.console import Console
        from megaverl.planner.placed_run import with_engine_share
        from megaverl.trainer.job import reporter
        from megaverl.trainer.loop import Trainer
        from megaverl.trainer.run import prepare_folder

        self.config = with_engine_share(self.config, job.context.placement)
        console = Console(job.context.rank)
        console.speaks = job.context.rank == reporter(job.context.placement)
        on_first_rank(
            lambda: prepare_folder(self.config.run_dir, self.config, "train"),
            job.context.control,
        )
        for warning in self.config.warnings:
            console.warn(warning)
        for choice in self.config.choices:
            console.print(choice)
        return Trainer(self.config, console, job)


class PPOTrainer(RLTrainer):
    """Trainer for a loop of the Python program: `rollout` returns responses, `update` trains on them.

    Every method is collective over all ranks. A step writes the same output as a step
    of `train`: trackers, samples, validation and checkpoints, and the model after the
    last of `total_steps`. After SIGTERM or SIGUSR1, the current or next call saves and
    exits with `errors.SAVED_AND_LEFT`. The configuration may name any algorithm; the
    default is PPO.

    Example:
        trainer = PPOTrainer(get_ppo_config(actor_model="models/small", total_steps=100, ...))
        while trainer.num_steps < 100:
            rollouts = trainer.rollout()
            print(trainer.update(rollouts)["reward/mean"])
    """

    _measured: Mapping[str, float] = {}
    _records: ExitStack | None = None
    _has_begun = False

    def _make_loop(self) -> Trainer:
        config = self.config
        if config.trainer.program is not None:
            raise ConfigError(
                "trainer.program: a Python program with its own loop takes the step itself. Remove the key."
            )
        if config.rollout.async_rollout and is_placed(config, "train"):
            _check_rollouts_ahead(config)
        return super()._make_loop()

    @property
    def num_steps(self) -> int:
        """Return the number of completed steps, including those before a resume."""
        with explained():
            self._begin()
        return self.loop.next_step

    def rollout(self) -> RolloutBatch:
        """Generate responses to the next `data.prompts_per_step` prompts. Nothing is scored or trained yet."""
        with explained():
            self._begin()
            drawn = self.loop.rollouts()
        self._measured = drawn.metrics
        return drawn.batch

    def update(self, rollouts: RolloutBatch) -> dict[str, float]:
        """Score `rollouts`, train on them, and send the new weights to the engine.

        Args:
            rollouts: batch from `rollout`, possibly changed: with fewer samples, or with a field `rewards` [B], whose
                values then replace scoring.

        Returns:
            Metrics of the step, and of a validation if one was due. Three metrics also have short names: `reward`
                (reward/mean), `loss` (actor/loss) and `kl`. `kl` is the divergence from the reference, or without a
                reference from the policy that generated (actor/approx_kl).
        """
        with explained():
            self._begin()
            metrics = self.loop.update(self._given(rollouts))
        # The first measured metric wins, because it is written last.
        short = {
            name: metrics[key]
            for name, keys in SHORT_NAMES.items()
            for key in reversed(keys)
            if key in metrics
        }
        return {**metrics, **short}

    def close(self) -> None:
        """Close trackers and wait for pending checkpoints. Called automatically at the program's end."""
        records, self._records = self._records, None
        if records is None:
            return
        atexit.unregister(self.close)
        with records:
            # Collective, so it is skipped if an error ends this program.
            if getattr(sys, "last_value", None) is None:
                self.loop.settle()

    def _given(self, rollouts: RolloutBatch) -> StoredRollouts:
        from megaverl.trainer.stored_rollouts import StoredRollouts
        from megaverl.workers.responses import once, score_metrics
        from megaverl.workers.reward import Scores

        metrics, scores = dict(self._measured), None
        if "rewards" in rollouts:
            rewards = rollouts.rewards.float()
            # Rewards above 0 count as correct.
            scores = Scores(rewards, {"given": rewards}, rewards > 0)
            metrics |= score_metrics(once(rollouts, scores), 0.0)
        return StoredRollouts(self.loop.next_step, 0, rollouts, scores, metrics)

    def _begin(self) -> None:
        """Restore a checkpoint if there is one, and send the first weights to the
        engine. Does nothing after the first call.
        """
        if self._has_begun:
            return
        self._has_begun = True
        self._records = ExitStack()
        self._records.enter_context(self.loop.begin())
        atexit.register(self.close)


def _check_rollouts_ahead(config: Config) -> None:
    """Refuse what a Python program's loop cannot combine with responses that are generated during an update.

    Raises:
        ConfigError: names the key, the reason and what to do.
    """
    rollout = config.rollout
    reasons = {
        "rollout.max_staleness": (
            rollout.max_staleness > 1,
            f"found {rollout.max_staleness}. An update of a Python program ends on all ranks together, so that "
            "generation is one step ahead of training. Set it to 1",
        ),
        "rollout.in_flight_updates": (
            rollout.in_flight_updates,
            "an update of a Python program sends weights after the responses that are generated during it. Remove it",
        ),
        "trainer.operators": (
            bool(config.trainer.operators),
            "with rollout.async_rollout, operators in a step of a Python program cannot run while the next responses "
            "are generated. Remove one of the two",
        ),
    }
    for key, (is_wrong, reason) in reasons.items():
        if is_wrong:
            raise ConfigError(f"{key}: {reason}, or use RLTrainer(...).train().")


def _given(settings: Mapping[str, Any]) -> list[Override]:
    """Return key and value of every setting that was passed."""
    algorithm = (
        {"algorithm": settings.get("algorithm")} if settings.get("algorithm") else {}
    )
    values = TrainerConfig(**settings).values()
    # The default "ppo" was not passed, so it must not override the configuration's
    # algorithm.
    if not algorithm:
        values.pop("algorithm", None) if values.get("algorithm") == {
            "name": "ppo"
        } else values["algorithm"].pop("name")
    return as_overrides(values)


def _reward_of(value: Reward | Path) -> dict[str, Any]:
    from megaverl.trainer.api.settings import reward_entry

    if isinstance(value, Path):
        value = str(value)
    # A name with a slash, or a folder with a config.json, is a model. A name with a
    # colon is a function.
    is_model = (
        isinstance(value, str)
        and ":" not in value
        and ("/" in value or (Path(value) / "config.json").exists())
    )
    if not is_model:
        return reward_entry(value, "reward_model")
    return {"name": "reward_model", "path": str(value)}


def _check(config: Config, *, is_rank: bool) -> None:
    """Run the checks that the command line runs before ranks start.

    Raises:
        ConfigError: says what is wrong and what to do.
    """
    if warning := check_before_ranks(config, "train", is_rank=is_rank):
        print(f"warning: {warning}", file=sys.stderr)
    for note in check_fields(config, "train", with_trials=not is_rank):
        print(f"note: {note}", file=sys.stderr)


@contextmanager
def _as_a_program() -> Iterator[None]:
    """Name settings by their names in Python, in configuration errors that are raised inside."""
    try:
        yield
    except InvalidConfig as error:
        raise InvalidConfig(
            map(name_python_setting, error.mistakes), "code and data that it names"
        ) from None


def _num_ranks(config: Config) -> int:
    from megaverl.trainer.elastic_agent import default_nproc

    return config.run.nproc or default_nproc(config, "train")


def _train_in_ranks(config: Config) -> dict[str, float]:
    """Run `megaverl train` in child processes with this configuration. Return the metrics of the last record.

    Raises:
        SystemExit: the run was asked to leave and has saved.
        TrainingStopped: the run failed.
    """
    import tempfile

    from megaverl.monitoring.backends import read_metrics
    from megaverl.trainer.elastic_agent import check_world, start_ranks

    refuse_in_a_check()
    _check(config, is_rank=False)
    with _as_a_program():
        check_code_and_data(config, "train")
    count = _num_ranks(config)
    check_world(config, "train", count)
    # Ranks receive it as a given value and do not print it.
    for choice in config.choices:
        print(choice)
    with tempfile.TemporaryDirectory(prefix="megaverl_") as folder:
        file = Path(folder, "config.yaml")
        file.write_text(config.to_yaml(), encoding="utf-8")
        arguments = ["-m", "megaverl.cli.main", "train", "--config", str(file)]
        with as_started():
            code = start_ranks(arguments, count, log_hint=str(config.run_dir / "logs"))
    if code in (SAVED_AND_LEFT, INTERRUPTED):
        raise SystemExit(code)
    if code:
        raise TrainingStopped(
            f"training ended with exit code {code}; {config.run_dir / 'logs'} says more."
        )
    records = read_metrics(config.run_dir / "metrics.jsonl")
    return {
        name: value
        for name, value in records[-1].items()
        if name not in ("step", "time")
    }


class RoleBasedDistributedStrategy:
    """Placement of roles on separate devices, as an alternative to the section `placement`.

    Args:
        devices: a DataParallelConfig, or a mapping of role to devices.
        roles: the same as keywords: actor=[0, 1], critic="cuda:2-3".

    Raises:
        ConfigError: a role does not exist, or devices have no valid form.

    Example:
        strategy = RoleBasedDistributedStrategy(DataParallelConfig(actor_devices=[0, 1], critic_devices=[2, 3]))
        strategy.resolve_for(config, world_size=4)["critic"]        # (2, 3)
        RLTrainer(config, strategy=strategy).train()
    """

    def __init__(
        self,
        devices: DataParallelConfig | Mapping[str, Devices] | None = None,
        **roles: Devices,
    ) -> None:
        self.placement = placement_of(devices) | placement_of(roles)

    def resolve_for(
        self, config: Description, world_size: int
    ) -> dict[str, tuple[int, ...]]:
        """Return the ranks of every role in a job of `world_size` ranks.

        Raises:
            ConfigError: lists every conflict between placement, grids and number of ranks.
        """
        checked = self.apply(config, check_paths=False)
        grids = role_grids(checked, used_roles(checked, "train"))
        return dict(resolve_placement(checked.placement, grids, world_size).ranks)

    def apply(self, config: Description, *, check_paths: bool = True) -> Config:
        """Return the configuration with this placement."""
        values = resolve(config, check_paths=check_paths).to_dict()
        return resolve({**values, "placement": self.placement}, check_paths=check_paths)
