"""What the ranks of a test world do with Muon."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megaverl.checkpoint.store import CheckpointStore
from megaverl.checkpoint.training_state import sharded_state
from megaverl.errors import ConfigError
from megaverl.platform import platform
from megaverl.workers.megatron_model import MegatronModel
from megaverl.workers.micro_batches import micro_batches_for
from megaverl.workers.optimizers import MegatronTrainable, single_optimizers
from tests.checkpoint.ranks import (
    OPTIMIZER,
    TOKENS,
    Roles,
    build,
    interrupted_run,
    loss_of,
    train,
)
from tests.models.ranks import whole_rows
from tests.workers.lora_ranks import model_with_adapters

platform.adapt_megatron()

from megatron.core.dist_checkpointing.dict_utils import nested_values  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedTensor  # noqa: E402

MUON: dict[str, Any] = {
    "optimizer": "muon",
    "lr": 5e-3,
    "muon_fp32_matmul_prec": "highest",
}
# Jordan 2024: the coefficients of the quintic iteration, each of whose steps maps a
# singular value s to a s + b s^3 + c s^5.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalised(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Newton-Schulz on the singular values themselves, in float64."""
    a, b, c = COEFFICIENTS
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.square().sum().sqrt()
    for _ in range(steps):
        values = a * values + b * values**3 + c * values**5
    return left @ torch.diag(values) @ right


def reference_step(
    matrix: torch.Tensor, momentum: torch.Tensor, rate: float, parts: list[torch.Tensor]
) -> torch.Tensor:
    """The next value of a matrix; `parts` are the row numbers that are orthogonalised together."""
    update = torch.empty_like(matrix)
    for rows in parts:
        part = orthogonalised(momentum[rows])
        update[rows] = part * max(1.0, part.shape[0] / part.shape[1]) ** 0.5
    return matrix * (1 - rate * OPTIMIZER["weight_decay"]) - rate * update


def rows_of(name: str, shape: torch.Size, config: Any) -> list[torch.Tensor]:
    """Queries, keys and values lie group by group in one matrix; every other matrix is one part."""
    rows = torch.arange(shape[0])
    if "linear_qkv" not in name:
        return [rows]
    width = config.kv_channels
    queries = config.num_attention_heads // config.num_query_groups * width
    groups = rows.view(config.num_query_groups, queries + 2 * width)
    return [part.flatten() for part in groups.split([queries, width, width], dim=1)]


def against_reference(folder: str, dtype: str, **ddp: Any) -> dict[str, list[float]]:
    """For each kind of parameter, the largest error of three updates, and the largest change."""
    options = {"muon_coefficient_type": "simple", "muon_scale_mode": "shape_scaling"}
    [trainable] = build(
        folder,
        {"actor": {}},
        optimizer=MUON | options,
        scheduler={},
        dtype=dtype,
        ddp=ddp,
    ).values()
    model = trainable.model
    start = {name: p.detach().double() for name, p in model.parameters.items()}
    weights = {name: p.clone() for name, p in start.items()}
    momenta = {name: torch.zeros_like(p) for name, p in start.items()}
    squares = {name: torch.zeros_like(p) for name, p in start.items()}
    for step in (1, 2, 3):
        trainable.update(
            micro_batches_for(model, whole_rows(TOKENS), 48), loss_of(model)
        )
        norm = sum(
            float(g.double().square().sum()) for g in trainable.whole_gradients.values()
        )
        # float32 weights are stepped on with the clipped gradients themselves.
        factor = 1.0 if dtype == "float32" else min(1.0, norm**-0.5)
        for name, gradient in trainable.whole_gradients.items():
            gradient = gradient.double() * factor
            weight, rate = weights[name], MUON["lr"]
            if is_matrix(name, weight):
                momenta[name].lerp_(gradient, 0.05)
                parts = rows_of(name, weight.shape, model.config)
                weights[name] = reference_step(weight, momenta[name], rate, parts)
                continue
            momenta[name].lerp_(gradient, 0.1)
            squares[name].lerp_(gradient.square(), 0.001)
            denominator = (squares[name] / (1 - 0.999**step)).sqrt() + 1e-8
            decay = OPTIMIZER["weight_decay"] if weight.dim() > 1 else 0.0
            weights[name] = (
                weight * (1 - rate * decay)
                - rate * momenta[name] / (1 - 0.9**step) / denominator
            )
    found: dict[str, list[float]] = {}
    for name, parameter in model.parameters.items():
        kind = "matrix" if is_matrix(name, parameter) else "rest"
        entry = found.setdefault(kind, [0.0, 0.0])
        error = (parameter.detach().double() - weights[name]).abs().max()
        change = (start[name] - weights[name]).abs().max()
        found[kind] = [max(entry[0], float(error)), max(entry[1], float(change))]
    return found


def is_matrix(name: str, tensor: torch.Tensor) -> bool:
    return tensor.dim() == 2 and "embedding" not in name and "output_layer" not in name


def figures_of_grids(
    folder: str, root: str, cases: list[dict[str, Any]], **saved: Any
) -> list[list[float]]:
    """Losses and gradient norms of two updates after a checkpoint: where it was saved, and resumed in each case.

    A case has a grid, and options of its roles. The second loss is that of updated
    weights.
    """
    store = CheckpointStore(root)
    options: dict[str, Any] = {"optimizer": MUON} | saved
    roles = build(folder, **options)
    train(roles, 2)
    path = store.save(2, roles, {"step": 2})
    results = [figures(roles)]
    for case in cases:
        optimizer = MUON | case.get("optimizer", {})
        roles = build(folder, seed=9, **(options | case | {"optimizer": optimizer}))
        store.resume(path, roles)
        results.append(figures(roles))
    return results


def figures(roles: Roles) -> list[float]:
    found = []
    for _ in range(2):
        for trainable in roles.values():
            micro = micro_batches_for(trainable.model, whole_rows(TOKENS), 48)
            report = trainable.update(micro, loss_of(trainable.model))
            found += [float(report.sums["loss"][1]), report.grad_norm]
    return found


def experts_with_biases(folder: str) -> list[Any]:
    """What is said of sharded state, and the losses without."""
    grids = {"actor": {"ep": 2}}
    try:
        build(folder, grids, optimizer=MUON)
    except ConfigError as error:
        whole = {"use_distributed_optimizer": False}
        roles = build(folder, grids, optimizer=MUON, ddp=whole)
        return [str(error), train(roles, 3)]
    return ["", []]


def interrupted(folder: str, root: str, **options: Any) -> dict[str, Any]:
    """`interrupted_run` with Muon."""
    return interrupted_run(folder, root, optimizer=MUON, **options)


def adapter_losses(folder: str, shapes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """On each grid: the losses of three updates of adapters by Muon."""
    found = {}
    for name, sizes in shapes.items():
        model = model_with_adapters(folder, sizes, {"rank": 4})
        assert isinstance(model, MegatronModel)
        trainable = MegatronTrainable(
            model, optimizer=MUON, scheduler={}, ddp={}, total_updates=8
        )
        found[name] = train({"actor": trainable}, 3)
        described = nested_values(sharded_state({"actor": trainable})["actor"])
        keys = {each.key for each in described if isinstance(each, ShardedTensor)}
        assert any(".momentum_buffer." in key for key in keys)
    return found


def state_bytes(folder: str, **options: Any) -> list[int]:
    """Elements of Muon's momentum on each rank, and of all matrices together."""
    [trainable] = build(folder, {"actor": {}}, optimizer=MUON, **options).values()
    train({"actor": trainable}, 1)
    held = sum(
        state["momentum_buffer"].numel()
        for single in single_optimizers(trainable.optimizer)
        for state in single.optimizer.state.values()
        if "momentum_buffer" in state
    )
    matrices = sum(
        p.numel() for n, p in trainable.model.parameters.items() if is_matrix(n, p)
    )
    every = [0] * dist.get_world_size()
    dist.all_gather_object(every, held)
    return [*every, matrices]
