"""What the rank does in the tests of layouts that are derived from vLLM."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megaverl.config.roles import RolloutConfig
from megaverl.models.architectures import weights_of
from megaverl.platform import platform
from megaverl.rollout import vllm_tracing
from megaverl.rollout.vllm_options import VLLMOptions
from megaverl.rollout.vllm_tracing import engine_config, inspect_here, trace
from megaverl.sharding.model_spec import ModelSpec
from megaverl.sharding.vllm import vllm_layouts
from megaverl.sharding.weight import shapes_of
from tests.sharding.specs import element_ids, fill
from tools import check_answers, check_layouts


def compare_with_rules(cases: list[dict[str, Any]]) -> list[list[str]]:
    """For each case (folder, tp, expert_parallel, placement) what a derived layout says otherwise than the rules."""
    platform.adapt_vllm()
    found = []
    for case in cases:
        spec = ModelSpec.from_folder(case["folder"])
        weights = weights_of(spec)
        ids, sources = (
            element_ids(weights),
            {weight.name: weight.shape for weight in weights},
        )
        inspect_here(spec.architecture)
        parallel = {
            "enable_expert_parallel": case["expert_parallel"],
            "expert_placement_strategy": case["placement"],
        }
        config = engine_config(case["folder"], case["tp"], dtype="float32", **parallel)
        rules = vllm_layouts(
            weights,
            spec,
            case["tp"],
            expert_parallel=case["expert_parallel"],
            expert_placement=case["placement"],
        )
        wrong = []
        for rank in range(case["tp"]):
            traced = trace(config, rank, sources).whole(sources)
            assert bool(traced.layout.views) == bool(rules(rank).views)
            mine, theirs = fill(traced.layout, ids), fill(rules(rank), ids)
            # vLLM computes Mamba's A as -exp of `A_log`, which arrives beside it.
            for name in traced.computed:
                assert name.endswith(".A") and theirs.pop(name) is not None
                # A view of the convolution's weight, which is compared itself.
                del mine[f"{name.removesuffix('A')}conv_weights"]
            wrong += [
                f"rank {rank}: {name}: only in one"
                for name in sorted(mine.keys() ^ theirs.keys())
            ]
            wrong += [
                f"rank {rank}: {name}"
                for name in mine.keys() & theirs.keys()
                if (mine[name] != theirs[name]).any()
            ]
        found.append(wrong)
    return found


def check_architectures(architectures: list[str]) -> list[list[str]]:
    return [
        [*check_layouts.check(architecture, [1, 2])] for architecture in architectures
    ]


def answers(architectures: list[str]) -> list[list[str]]:
    return [[*check_answers.compare(architecture, 2)] for architecture in architectures]


def built_from_transformers(architecture: str) -> dict[str, bool]:
    """Whether transformers' class is what it was, and can be called and made, once vLLM has built a model of it."""
    import transformers

    model_class = getattr(transformers, architecture)
    with tempfile.TemporaryDirectory() as folder:
        check_layouts.write_folder(architecture, Path(folder), check_layouts.BASE)
        config = transformers.AutoConfig.from_pretrained(folder)
        before = model_class(config).eval()
        inner = type(before.base_model)
        was = inner.__init__, inner.__call__, inner.__bases__
        tokens = torch.tensor([[3, 5, 7]])
        wanted = before(tokens).logits
        built = vllm_tracing.build(
            engine_config(folder, 1, dtype="float32", max_model_len=64), 0
        )
    after = model_class(config).eval()
    after.load_state_dict(before.state_dict())
    return {
        "class": (inner.__init__, inner.__call__, inner.__bases__) == was,
        "made before": torch.equal(before(tokens).logits, wanted),
        "made after": torch.equal(after(tokens).logits, wanted),
        "engine's compiles": isinstance(built.model, inner)
        and hasattr(built.model, "do_not_compile"),
    }


def layers_are_repeated(architecture: str) -> dict[str, Any]:
    """What is traced with and without repeating one layer of each kind."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = check_layouts.BASE | check_layouts.MORE.get(architecture, {})
        sources = check_layouts.write_folder(architecture, Path(folder), sizes)
        inspect_here(architecture)
        config = engine_config(folder, 2, dtype="float32", max_model_len=64)
        fed: list[int] = []
        repeated = trace(config, 1, sources).whole(sources)
        kinds = vllm_tracing._Kinds.of(sources)
        fed.append(len(kinds.first))
        alone = vllm_tracing._Kinds([*sources], {})
        vllm_tracing._Kinds.of = classmethod(lambda cls, sources: alone)  # type: ignore[method-assign, assignment]
        whole = trace(config, 1, sources).whole(sources)
        before = torch.get_default_dtype()
    return {
        "same": sorted(repeated.layout.pieces) == sorted(whole.layout.pieces)
        and repeated.layout.local_shapes == whole.layout.local_shapes
        and repeated.layout.views == whole.layout.views
        and repeated.computed == whole.computed,
        "traced": fed[0],
        "of": len(sources),
        "dtype": str(before),
    }


def other_layout(folder: str) -> str:
    """What an engine says whose vLLM loads otherwise than it was seen to."""
    from unittest.mock import patch

    from megaverl.errors import RolloutError
    from megaverl.rollout import vllm_engine, vllm_layouts

    def changed(*args: Any) -> vllm_tracing.Trace:
        trace = vllm_tracing.trace_into(*args)
        swapped = {
            "model.layers.0.mlp.gate_proj.weight": "model.layers.0.mlp.up_proj.weight"
        }
        swapped |= {value: key for key, value in swapped.items()}
        layout = trace.found.layout
        pieces = tuple(
            p._replace(tensor=swapped.get(p.tensor, p.tensor)) for p in layout.pieces
        )
        return trace._replace(
            found=replace(trace.found, layout=replace(layout, pieces=pieces))
        )

    with patch.object(vllm_layouts, "trace_into", changed):
        spec = ModelSpec.from_folder(folder)
        options = VLLMOptions(
            seed=0, dtype=torch.float32, max_model_len=64, load_weights=False
        )
        made = vllm_engine.VLLMEngine(folder, RolloutConfig(), options)
        try:
            made.layouts(shapes_of(weights_of(spec)))
        except RolloutError as error:
            return str(error)
        finally:
            made.close()
    return "no error"
