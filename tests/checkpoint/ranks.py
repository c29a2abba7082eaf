"""What the ranks of a test world do with checkpoints."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megaverl.checkpoint import engine_state, shards
from megaverl.checkpoint import store as store_module
from megaverl.checkpoint.commit import Retention
from megaverl.checkpoint.store import CheckpointStore
from megaverl.config.fsdp import FsdpConfig
from megaverl.distributed.grid import GridShape
from megaverl.errors import MegaverlError
from megaverl.models.packing import MicroBatch
from megaverl.sharding.model_spec import ModelSpec
from megaverl.weights.torch_dist_index import read_index
from megaverl.workers.fsdp_model import FSDPModel
from megaverl.workers.megatron_model import MegatronModel
from megaverl.workers.micro_batches import micro_batches_for, share
from megaverl.workers.model import Loss, TrainingModel
from megaverl.workers.model_options import ModelOptions
from megaverl.workers.optimizers import (
    FSDPTrainable,
    MegatronTrainable,
    local,
    single_optimizers,
)
from tests.models.ranks import manager, whole_rows

# megatron-core collects garbage at every save and load: what the libraries brought
# along need not be looked through
gc.freeze()

Roles = dict[str, Any]
OPTIMIZER = {"lr": 1e-2, "min_lr": 0.0, "weight_decay": 0.1, "clip_grad": 1.0}
SCHEDULE = {"lr_warmup_steps": 2, "lr_decay_style": "cosine"}
TOKENS = torch.randint(
    0, 100, (8, 12), generator=torch.Generator().manual_seed(3)
).tolist()


def build(
    folder: str, grids: dict[str, dict[str, Any]], *, seed: int = 0, **options: Any
) -> Roles:
    """An actor, and a critic if `grids` names one; each starts from random weights of `seed`.

    A grid of {"fsdp": {...}} is a role under FSDP2, so configured; with "tp" on
    tensor-parallel ranks too.
    """
    roles: Roles = {}
    for role, sizes in grids.items():
        if "fsdp" in sizes:
            roles[role] = build_fsdp(
                folder, role, sizes["fsdp"], tp=sizes.get("tp", 1), seed=seed, **options
            )
            continue
        options_of_grid: dict[str, Any] = {"role": role, **sizes}
        shape = GridShape.fit(dist.get_world_size(), **options_of_grid)
        model = MegatronModel(
            ModelSpec.from_folder(folder),
            manager().grid(shape),
            ModelOptions(
                dtype=getattr(torch, options.get("dtype", "float32")),
                seed=seed,
                value_head=role == "critic",
                role=role,
            ),
            freeze=options.get("freeze", []),
        )
        roles[role] = MegatronTrainable(
            model,
            optimizer=OPTIMIZER | options.get("optimizer", {}),
            scheduler=options.get("scheduler", SCHEDULE),
            ddp=options.get("ddp", {}),
            total_updates=options.get("total_updates", 8),
        )
    return roles


def build_fsdp(
    folder: str, role: str, fsdp: dict[str, Any], *, tp: int, seed: int, **options: Any
) -> FSDPTrainable:
    model = FSDPModel(
        folder,
        manager().grid(GridShape.fit(dist.get_world_size(), tp=tp, role=role)),
        manager(),
        ModelOptions(
            dtype=getattr(torch, options.get("dtype", "float32")),
            seed=seed,
            trained=True,
            value_head=role == "critic",
            role=role,
        ),
        fsdp=FsdpConfig(**fsdp),
        freeze=options.get("freeze", []),
    )
    return FSDPTrainable(
        model,
        optimizer=OPTIMIZER | options.get("optimizer", {}),
        scheduler=options.get("scheduler", SCHEDULE),
        total_updates=options.get("total_updates", 8),
    )


def loss_of(model: TrainingModel) -> Loss:
    """Likelihood of the tokens for an actor, squared distance from 1 for a critic."""

    def loss(
        output: torch.Tensor, micro: MicroBatch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if model.value_head:
            value = (model.values(output, micro)[0] - 1.0).square().sum() / 88
        else:
            value = -model.log_probs(output, micro)[0].sum() / 88
        return value, {"loss": share(value)}

    return loss


def train(roles: Roles, num_updates: int) -> list[float]:
    """Update every role in turn; the losses."""
    losses = []
    for _ in range(num_updates):
        for trainable in roles.values():
            micro = micro_batches_for(trainable.model, whole_rows(TOKENS), 48)
            report = trainable.update(micro, loss_of(trainable.model))
            losses.append(float(report.sums["loss"][1]))
    return losses


def digest(roles: Roles) -> dict[str, str]:
    """This rank's parameters, optimizer states and schedules, down to the bit."""
    found = {}
    for role, trainable in roles.items():
        for name, parameter in trainable.model.parameters.items():
            found[f"{role}.{name}"] = _hash(parameter)
        found[f"{role}.schedule"] = (
            f"{trainable.learning_rate} {trainable.scheduler.num_steps}"
        )
        if isinstance(trainable, FSDPTrainable):
            for place, parameter in enumerate(trainable.parameters):
                for key, value in trainable.optimizer.state[parameter].items():
                    found[f"{role}.{place}.{key}"] = _hash(local(value))
            continue
        for index, optimizer in enumerate(single_optimizers(trainable.optimizer)):
            parameters = [
                p for group in optimizer.optimizer.param_groups for p in group["params"]
            ]
            for place, parameter in enumerate(parameters):
                found[f"{role}.{index}.{place}.main"] = _hash(parameter)
                for key, value in optimizer.optimizer.state[parameter].items():
                    found[f"{role}.{index}.{place}.{key}"] = _hash(value)
    return found


def _hash(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()[:16]


def interrupted_run(
    folder: str, root: str, grids: dict[str, dict[str, int]], **options: Any
) -> dict[str, Any]:
    """Train 2 updates, save, train 2 more; then load into other models and train these 2 again."""
    roles = build(folder, grids, **options)
    before = options.get("updates_before", 2)
    train(roles, before)
    store = CheckpointStore(root)
    if options.get("in_background"):
        at_save = digest(roles)
        path, losses = _save_while_training(store, before, roles)
    else:
        path = store.save(before, roles, {"next_step": before})
        at_save = digest(roles)
        losses = train(roles, 2)
    resumed = build(folder, grids, seed=9, **options)
    # A used model and optimizer must be overwritten too.
    train(resumed, options.get("updates_of_resumed", 1))
    state = store.load(path, resumed)
    return {
        "state": state,
        "at_load": _changed(at_save, digest(resumed)),
        "losses": [losses, train(resumed, 2)],
        "at_end": _changed(digest(roles), digest(resumed)),
    }


def _save_while_training(
    store: CheckpointStore, step: int, roles: Roles
) -> tuple[Path, list[float]]:
    """Start a save, take 2 updates, and only then let it write."""
    go_on, write = threading.Event(), store_module._write

    def write_later(*arguments: Any) -> Any:
        go_on.wait()
        return write(*arguments)

    store_module._write = write_later
    try:
        store.start(step, roles, {"next_step": step})
        losses = train(roles, 2)
    finally:
        store_module._write = write
        go_on.set()
    path = store.finish()
    assert path is not None
    return path, losses


def _changed(one: dict[str, str], other: dict[str, str]) -> list[str]:
    return sorted(
        name for name in one.keys() | other.keys() if one.get(name) != other.get(name)
    )


def save_run(
    folder: str,
    root: str,
    grids: dict[str, dict[str, int]],
    steps: list[int],
    **options: Any,
) -> list[float]:
    """Save at each of `steps`, one update before each; the losses of 2 updates after the last."""
    store = CheckpointStore(root, retention=Retention(**options.get("retention", {})))
    roles = build(folder, grids, **options)
    for step in steps:
        train(roles, 1)
        store.save(step, roles, {"step": step}, best=step in options.get("best", []))
    return train(roles, 2)


def resume_run(
    folder: str,
    root: str,
    grids: dict[str, dict[str, int]],
    resume: str = "auto",
    **options: Any,
) -> dict[str, Any]:
    """Resume as a run does, and take 2 updates."""
    store = CheckpointStore(root)
    try:
        path = store.resolve(resume)
        if path is None:
            return {"path": None}
        roles = build(folder, grids, seed=9, **options)
        path, state = store.resume(path, roles)
    except MegaverlError as error:
        return {"error": type(error).__name__, "text": str(error)}
    return {"path": str(path), "state": state, "losses": train(roles, 2)}


def settings(roles: Roles) -> dict[str, Any]:
    """Where each role's schedule stands, and the hyperparameters that its next update takes."""
    return {
        role: [
            trainable.scheduler.num_steps,
            [
                {
                    name: repr(value)
                    for name, value in group.items()
                    if name not in ("params", "step")
                }
                for group in trainable.scheduler.optimizer.param_groups
            ],
        ]
        for role, trainable in roles.items()
    }


def resume_with(
    folder: str, root: str, saved: dict[str, Any], resumed: dict[str, Any]
) -> list[dict[str, Any]]:
    """Save after 4 updates, resume with other options; the settings then, and those of a run that never stopped."""
    roles = build(folder, **saved)
    train(roles, 4)
    path = CheckpointStore(root).save(4, roles, {"next_step": 4})
    expected = build(folder, **resumed)
    for trainable in expected.values():
        trainable.scheduler.step(increment=4)
    other = build(folder, seed=9, **resumed)
    CheckpointStore(root).load(path, other)
    found = [settings(other), settings(expected)]
    train(other, 1)
    return found


class Traffic(TorchDispatchMode):
    """Counts, while it is entered, the bytes of tensors in collectives, and of memory that is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = self.taken = 0
        self._places: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self.sent += sum(
                each.nbytes
                for each in tree_leaves(args)
                if isinstance(each, torch.Tensor)
            )
            return found
        known = {
            _place(each)
            for each in tree_leaves((args, kwargs))
            if isinstance(each, torch.Tensor)
        }
        for each in tree_leaves(found):
            if (
                isinstance(each, torch.Tensor)
                and each.device.type == "cpu"
                and _place(each) not in known
            ):
                self.taken += each.untyped_storage().nbytes()
        return found


def _place(tensor: torch.Tensor) -> int:
    return 0 if tensor.device.type == "meta" else tensor.untyped_storage().data_ptr()


def measured_save(
    folder: str, root: str, grids: dict[str, dict[str, int]], **options: Any
) -> dict[str, Any]:
    """Save after an update: the bytes that this rank has written, sent and taken; and those of the whole state."""
    roles = build(folder, grids, **options)
    train(roles, 1)
    with Traffic() as traffic:
        path = CheckpointStore(root).save(1, roles, {"step": 1})
    # the names of files end with a rank's
    written = sum(
        file.stat().st_size for file in path.glob(f"__{dist.get_rank()}_*.distcp")
    )
    state = sum(array.nbytes for array in read_index(path).arrays.values())
    return {
        "written": written,
        "sent": traffic.sent,
        "taken": traffic.taken,
        "state": state,
    }


def gathered_save(
    folder: str, root: str, grids: dict[str, dict[str, int]], **options: Any
) -> list[str]:
    """Save as megaverl did when megatron-core gathered the state, resume that, and say what is not as it was."""
    roles = build(folder, grids, **options)
    train(roles, 2)
    replaced = [
        (engine_state, "_own_shards", contextlib.nullcontext),
        (engine_state, "share_replicas", _nothing),
    ]
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, instead in replaced:
            patch.setattr(owner, name, instead)
        path = CheckpointStore(root).save(2, roles, {"step": 2})
    resumed = build(folder, grids, seed=9, **options)
    CheckpointStore(root).load(path, resumed)
    return _changed(digest(roles), digest(resumed))


def _nothing(*_: Any) -> None:
    pass


def move(
    folder: str, root: str, to: str, grids: dict[str, dict[str, int]], **options: Any
) -> None:
    """Load the newest checkpoint on `grids` and save it elsewhere."""
    roles = build(folder, grids, seed=9, **options)
    source = CheckpointStore(root).latest()
    assert source is not None
    state = CheckpointStore(root).load(source, roles)
    CheckpointStore(to).save(int(state["step"]), roles, state)


def failing_save(
    folder: str,
    root: str,
    grids: dict[str, dict[str, int]],
    fault: str,
    in_background: bool = False,
) -> dict[str, str]:
    """Save at step 2 where one rank, or the disk, fails on the way; what each rank hears."""
    store = CheckpointStore(root)
    roles = build(folder, grids)
    replaced: list[tuple[Any, str, Any]] = []

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    if fault == "write" and dist.get_rank() == 1:
        replaced.append((shards, "write_tensor", shards.write_tensor))
    if fault == "random state" and dist.get_rank() == 1:
        replaced.append((store_module, "write_bytes", store_module.write_bytes))
    if fault == "commit" and dist.get_rank() == 0:
        replaced.append((Path, "rename", Path.rename))
    for owner, name, _ in replaced:
        setattr(owner, name, fail)
    if fault == "vanished folder":
        store.save(1, roles, {"step": 1})
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(root)
    if fault == "full disk":
        replaced.append((shutil, "disk_usage", shutil.disk_usage))
        usage = shutil.disk_usage(root)._replace(free=1000)
        shutil.disk_usage = lambda path: usage  # type: ignore[assignment]
    try:
        store.start(2, roles, {"step": 2}, in_background=in_background)
        store.finish()
    except MegaverlError as error:
        return {
            "error": type(error).__name__,
            "text": str(error),
            "latest": str(store.latest()),
        }
    finally:
        for owner, name, original in replaced:
            setattr(owner, name, original)
    return {}


def random_draws(folder: str, root: str) -> list[list[float]]:
    """What the generators give after a save, and again after the load."""
    roles = build(folder, {"actor": {}})
    store = CheckpointStore(root)
    path = store.save(1, roles, {})
    first = _draw()
    store.load(path, roles)
    return [first, _draw()]


def _draw() -> list[float]:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    with get_cuda_rng_tracker().fork():
        tracked = torch.rand(1).item()
    return [tracked, torch.rand(1).item(), random.random(), float(numpy.random.rand())]
