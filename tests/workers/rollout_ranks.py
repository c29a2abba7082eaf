"""What the ranks do in the tests of a rollout that takes its weights from an actor."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from megaverl.config.roles import ReshardConfig, RolloutConfig
from megaverl.distributed.grid import GridShape
from megaverl.distributed.worlds import default_group
from megaverl.errors import ReshardError
from megaverl.rollout.engine import SamplingOptions
from megaverl.rollout.vllm_engine import VLLMEngine
from megaverl.sharding.model_spec import ModelSpec
from megaverl.workers.megatron_model import MegatronModel
from megaverl.workers.rollout import Rollout
from megaverl.workers.weight_sync import ActorWeights, WeightSync, adopting
from tests.models.ranks import manager


def versions(
    folder: str, other_folder: str, grid: dict[str, int], tp: int, prompts: list[list[int]], dtype: str
) -> dict[str, Any]:
    """Answers with shared, then with overlapped weights, of the folder's model and of the other's."""
    model = MegatronModel(ModelSpec.from_folder(folder), manager().grid(GridShape(**grid)), dtype=torch.float32, seed=0)
    model.load(folder)
    shared = ReshardConfig(check_every=1)
    engine = VLLMEngine(
        folder,
        RolloutConfig(tp=tp),
        seed=0,
        dtype=getattr(torch, dtype),
        max_model_len=64,
        load_weights=False,
        num_sequences=16,
        on_load=adopting(model, default_group(), None, shared),
    )
    storages = {parameter.untyped_storage().data_ptr() for parameter in model.parameters.values()}
    adopted = sum(tensor.untyped_storage().data_ptr() in storages for tensor in engine.named_parameters().values())
    layouts = engine.layouts(model.weights, model.spec)

    def answer(rollout: Rollout) -> Any:
        sampling = SamplingOptions(max_tokens=8, temperature=0.0)
        try:
            return [asdict(found) for found in rollout.generate(prompts, sampling, [0] * len(prompts))]
        except ReshardError as error:
            return str(error)

    sync = WeightSync(ActorWeights.of(model), layouts, engine, default_group(), config=shared)
    rollout = Rollout(engine, default_group(), sync)
    found = {"adopted": adopted, "parameters": len(engine.named_parameters()), "unset": answer(rollout)}
    sync.reshard()
    found["first"] = answer(rollout)
    sync.source_changes()
    model.load(other_folder)
    found["between"] = answer(rollout)
    stats = sync.reshard()
    found |= {"second": answer(rollout), "stats": asdict(stats)}
    # overlap: the engine gets storage of its own, and a second set beside it
    for parameter in engine.named_parameters().values():
        parameter.data = parameter.data.clone()
    overlapped = ReshardConfig(overlap=True, check_every=1)
    sync = WeightSync(ActorWeights.of(model), layouts, engine, default_group(), config=overlapped)
    rollout = Rollout(engine, default_group(), sync)
    sync.reshard()
    found["overlapped_second"] = answer(rollout)
    model.load(folder)
    sync.start()
    found["draining"] = answer(rollout)
    stats = sync.finish()
    found |= {"overlapped_first": answer(rollout), "version": rollout.weight_version}
    engine.close()
    dist.barrier()
    return found
