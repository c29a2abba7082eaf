"""AdamW with moments in 2 bytes and 1 byte, beside torch's in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megaverl.models.tiny import make_tiny_folder
from megaverl.workers.small_moments import (
    SmallMomentAdamW,
    decoded,
    dynamic_levels,
    encoded,
)
from tests.checkpoint.test_resume import check_exact
from tests.launcher import Launcher

RANKS = "tests.checkpoint.ranks:"
SETTINGS: dict[str, Any] = {
    "lr": 1e-2,
    "betas": (0.9, 0.98),
    "eps": 1e-8,
    "weight_decay": 0.1,
}
SMALL = {"use_precision_aware_optimizer": True}
BFLOAT16 = SMALL | {
    "exp_avg_dtype": "bfloat16",
    "exp_avg_sq_dtype": "bfloat16",
    "adam_beta2": 0.95,
}
BYTES = SMALL | {"exp_avg_dtype": "uint8", "exp_avg_sq_dtype": "uint8"}


def test_levels_are_those_of_the_paper() -> None:
    """Seven decades, of which each has twice as many levels as the one below."""
    for signed in (True, False):
        levels = dynamic_levels(signed)
        assert levels.shape == (256,) and bool((levels.diff() > 0).all())
        assert levels.max() == 1 and (levels == 0).sum() == 1
        positive = levels[levels > 0][:-1]
        counts = [int((positive > 10.0**low).sum()) for low in range(-7, 0)]
        decades = [a - b for a, b in zip(counts, [*counts[1:], 0], strict=True)]
        assert decades == [2**k if signed else 2 ** (k + 1) for k in range(7)]


@given(st.integers(0, 2**31), st.sampled_from([1, 255, 256, 1000]), st.booleans())
def test_encoding_what_was_decoded_changes_nothing(
    seed: int, numel: int, signed: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator) ** 3
    values = values if signed else values.abs()
    codes, scales = encoded(values, signed=signed)
    read = decoded(codes, scales, signed=signed)
    again = encoded(read, signed=signed)
    assert torch.equal(codes, again[0]) and torch.equal(scales, again[1])
    # The widest gap between levels is that at the top, 0.9 / 64 of the block's scale.
    largest = values.abs().max()
    assert float((read - values).abs().max()) <= 0.9 / 64 * float(largest)


def trajectory(optimizer_of: Any, num_steps: int = 60) -> tuple[torch.Tensor, Any]:
    """The change of a weight under gradients that have a direction and noise."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(96, 128, generator=generator)
    weight = torch.nn.Parameter(start.clone())
    direction = torch.randn(start.shape, generator=generator)
    # Rows of gradients differ in size, as those of layers do.
    direction *= torch.logspace(-3, 0, 96).view(-1, 1)
    optimizer = optimizer_of([{"params": [weight]}])
    for _ in range(num_steps):
        noise = torch.randn(start.shape, generator=generator)
        weight.grad = direction + noise * direction.abs()
        optimizer.step()
    return weight.detach() - start, optimizer


@pytest.mark.parametrize(
    ("dtype", "error"),
    [(torch.float32, 1e-6), (torch.bfloat16, 5e-3), (torch.uint8, 4e-2)],
    ids=["float32", "bfloat16", "8 bits"],
)
def test_updates_are_those_of_adamw_within_the_stated_error(
    dtype: torch.dtype, error: float
) -> None:
    expected, _ = trajectory(lambda groups: torch.optim.AdamW(groups, **SETTINGS))
    dtypes = {"exp_avg": dtype, "exp_avg_sq": dtype}
    found, optimizer = trajectory(
        lambda groups: SmallMomentAdamW(groups, **SETTINGS, dtypes=dtypes)
    )
    measured = float((found - expected).norm() / expected.norm())
    assert measured < error
    if dtype != torch.float32:
        assert measured > error / 50, "moments have been rounded"
    [state] = optimizer.state.values()
    nbytes = sum(tensor.nbytes for name, tensor in state.items() if name != "step")
    assert nbytes / found.numel() == pytest.approx(
        {torch.float32: 8, torch.bfloat16: 4, torch.uint8: 2 + 8 / 256}[dtype]
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tensors large enough for 8 bits, and others that are too small."""
    return make_tiny_folder(
        tmp_path_factory.mktemp("model"), "Qwen2ForCausalLM", vocab_size=512
    )


@pytest.mark.parametrize("optimizer", [BFLOAT16, BYTES], ids=["bfloat16", "8 bits"])
def test_a_resumed_run_ends_with_the_same_bits(
    launch: Launcher, folder: Path, tmp_path: Path, optimizer: dict[str, Any]
) -> None:
    check_exact(
        launch.world(
            2,
            RANKS + "interrupted_run",
            folder=folder,
            root=tmp_path,
            grids={"actor": {"fsdp": {}}},
            optimizer=optimizer,
        )
    )


def test_a_checkpoint_goes_on_with_other_moments_ranks_and_engine(
    launch: Launcher, folder: Path, tmp_path: Path
) -> None:
    """Checkpoints have float32 moments, whatever stored them."""
    shared = {"folder": folder, "root": tmp_path}
    sharded = {"actor": {"fsdp": {}}}
    expected = launch.world(
        2, RANKS + "save_run", steps=[2], grids=sharded, optimizer=BYTES, **shared
    )[0]
    for grids, optimizer in (
        (sharded, {}),
        ({"actor": {"fsdp": {"sharding_strategy": "no_shard"}}}, BYTES),
        ({"actor": {"fsdp": {}, "tp": 2}}, BYTES),
        (sharded, BFLOAT16 | {"adam_beta2": 0.999}),
        ({"actor": {"tp": 2}}, {}),
    ):
        found = launch.world(
            2, RANKS + "resume_run", grids=grids, optimizer=optimizer, **shared
        )[0]
        assert found["losses"] == pytest.approx(expected, abs=5e-3)
