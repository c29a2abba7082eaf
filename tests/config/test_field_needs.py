"""What values of passed-through fields need, against megatron-core itself on this machine."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from megaverl.config import field_needs
from megaverl.config.field_needs import (
    DDP_NEEDS,
    MEGATRON_NEEDS,
    OPTIMIZER_NEEDS,
    FieldMachine,
    why_not_there,
)
from megaverl.config.passthrough import TARGETS
from megaverl.models.tiny import make_tiny_folder
from tests.launcher import Launcher

WITHOUT_GPU = FieldMachine(has_gpu=False)
# A value of each field where `True` is none.
VALUES: dict[str, Any] = {
    "fp8": "hybrid",
    "fp4": "e2m1",
    "symmetric_ar_type": "two_shot",
}
# What megatron-core's layers without Transformer Engine do not read: they would compute
# in another way than asked for.
UNREAD = {
    "megatron.attention_backend=flash",
    "megatron.attention_backend=fused",
    "megatron.cuda_graph_impl=transformer_engine",
    "megatron.external_cuda_graph=True",
    "megatron.fp4=e2m1",
    "megatron.tp_comm_overlap=True",
}


def test_every_field_is_one_of_megatron_cores_in_some_version() -> None:
    known = {
        name for part in field_needs.NEEDS for name in TARGETS[part].fields() or {}
    }
    listed = {name for needs in field_needs.NEEDS.values() for name in needs}
    assert len(listed - known) <= 3, listed - known
    for part, needs in field_needs.NEEDS.items():
        assert not set(needs) & TARGETS[part].owned.keys()


@pytest.mark.parametrize(
    ("machine", "name", "value", "said"),
    [
        (
            WITHOUT_GPU,
            "fp8",
            "hybrid",
            "needs Transformer Engine .* needs a GPU and is not here. Leave it out",
        ),
        (WITHOUT_GPU, "fp8", None, "^$"),
        (WITHOUT_GPU, "attention_backend", "flash", "Leave it at auto"),
        (WITHOUT_GPU, "attention_backend", "auto", "^$"),
        (WITHOUT_GPU, "moe_permute_fusion", False, "^$"),
        (
            WITHOUT_GPU,
            "recompute_modules",
            ["mlp", "layernorm"],
            "needs Transformer Engine",
        ),
        (WITHOUT_GPU, "recompute_modules", ["mlp"], "^$"),
        (
            FieldMachine(True, lambda name: False),
            "moe_token_dispatcher_type",
            "flex",
            "DeepEP .* not installed here",
        ),
        (
            FieldMachine(True, lambda name: name == "deep_ep"),
            "moe_token_dispatcher_type",
            "flex",
            "^$",
        ),
        (
            FieldMachine(True, lambda name: name == "grouped_gemm"),
            "moe_grouped_gemm",
            True,
            "^$",
        ),
        (FieldMachine(True), "fp8", "hybrid", "^$"),
        (
            FieldMachine(True, has_fp8=False),
            "fp8",
            "hybrid",
            "multiplies in 8 bits, which this one does not",
        ),
        (FieldMachine(True), "cuda_graph_impl", "local", "^$"),
        (WITHOUT_GPU, "cuda_graph_impl", "none", "^$"),
        (WITHOUT_GPU, "hidden_dropout", 0.1, "^$"),
        (WITHOUT_GPU, "optimizer", "muon", "^$"),
        (
            FieldMachine(False, lambda name: False),
            "optimizer",
            "muon",
            "emerging-optimizers .* Python 3.12 .* not installed here. .* Use adam",
        ),
        (FieldMachine(False, lambda name: True), "optimizer", "muon", "^$"),
        (FieldMachine(False, lambda name: False), "optimizer", "adam", "^$"),
    ],
)
def test_what_a_value_needs(
    machine: FieldMachine, name: str, value: Any, said: str
) -> None:
    import re

    part = "optimizer" if name == "optimizer" else "megatron"
    why = why_not_there(part, name, value, machine)
    assert re.search(said, why), why


def test_megatron_core_cannot_compute_them_on_a_cpu(
    tmp_path: Path, launch: Launcher
) -> None:
    """Every field of the tables is tried without them: whatever works after all is listed here."""
    folder = make_tiny_folder(tmp_path / "model", "Qwen3MoeForCausalLM")
    fields = {
        part: [
            name
            for name in needs
            if name in (TARGETS[part].fields() or {})
            # Its package computes on a CPU.
            and (name != "optimizer" or find_spec("emerging_optimizers") is None)
        ]
        for part, needs in (
            ("megatron", MEGATRON_NEEDS),
            ("optimizer", OPTIMIZER_NEEDS),
            ("ddp", DDP_NEEDS),
        )
    }
    [built] = launch.ranks(
        1,
        "tests.config.test_field_needs:fields_that_are_built",
        folder=str(folder),
        fields=fields,
    ).check()
    assert set(built) <= UNREAD


def fields_that_are_built(folder: str, fields: dict[str, list[str]]) -> list[str]:
    """Return the fields with which a model is built and takes a step, the tables being empty."""
    import torch
    import torch.distributed as dist

    from megaverl.config.roles import ActorConfig
    from megaverl.distributed.grid import GridShape
    from megaverl.sharding.model_spec import ModelSpec
    from megaverl.trainer.trial_build import build_and_step

    needs = {part: dict(table) for part, table in field_needs.NEEDS.items()}
    for table in field_needs.NEEDS.values():
        table.clear()
    dist.init_process_group("gloo")
    spec = ModelSpec.from_folder(folder)
    built = []
    for part, names in fields.items():
        for name in names:
            values = needs[part][name].values or (VALUES.get(name, True),)
            for value in values:
                given = [value] if name == "recompute_modules" else value
                # Each choice of an attention backend stays in the environment of the
                # process.
                mapping = {name: given} | (
                    {"recompute_granularity": "selective"} if given == [value] else {}
                )
                section = ActorConfig(
                    **{part: {**getattr(ActorConfig(), part, {}), **mapping}}
                )
                try:
                    build_and_step(
                        spec,
                        GridShape(),
                        torch.float32,
                        section.megatron,
                        "actor",
                        section,
                        "train",
                    )
                except Exception:
                    continue
                built.append(f"{part}.{name}={value}")
    return built
