"""What the ranks do in the tests of a rollout that takes its weights from an actor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from megaverl.config.roles import ReshardConfig, RolloutConfig
from megaverl.distributed.grid import GridShape
from megaverl.distributed.job_context import default_group
from megaverl.errors import ReshardError
from megaverl.rollout.engine import SamplingOptions
from megaverl.rollout.vllm_engine import VLLMEngine
from megaverl.rollout.vllm_options import VLLMOptions
from megaverl.sharding.model_spec import ModelSpec
from megaverl.sharding.weight import shapes_of
from megaverl.weights.reshard import FinalParts
from megaverl.workers.megatron_model import MegatronModel
from megaverl.workers.model_options import ModelOptions
from megaverl.workers.rollout import Rollout
from megaverl.workers.weight_sync import ActorWeights, WeightSync, adopting
from tests.models.ranks import manager


def of_the_actor(
    model: MegatronModel, parameters: Mapping[str, torch.Tensor]
) -> set[str]:
    """Names of the engine's parameters that lie in the actor's storage."""
    storages = {
        parameter.untyped_storage().data_ptr()
        for parameter in model.parameters.values()
    }
    return {
        name
        for name, tensor in parameters.items()
        if tensor.untyped_storage().data_ptr() in storages
    }


@contextmanager
def pool_watched(model: MegatronModel) -> Iterator[list[int]]:
    """Of an engine made inside: how many parameters are the actor's as vLLM leaves its memory pool for weights."""
    from vllm.v1.worker.gpu_worker import Worker

    found: list[int] = []

    @contextmanager
    def pool(self: Any, tag: str) -> Iterator[None]:
        yield
        if tag == "weights":
            found.append(
                len(
                    of_the_actor(
                        model, dict(self.model_runner.get_model().named_parameters())
                    )
                )
            )

    with patch.object(Worker, "_maybe_get_memory_pool_context", pool):
        yield found


@contextmanager
def sleeping(
    engine: VLLMEngine, model: MegatronModel, sync: WeightSync
) -> Iterator[list[str]]:
    """Inside, an engine that goes through all of vLLM's sleep, and loses at the end of
    it what is not the actor's: the order of what happens. vLLM's CPU worker frees
    nothing, and there is no pool.
    """
    worker: Any = engine.llm.llm_engine.model_executor.driver_worker.worker  # type: ignore[attr-defined]
    events: list[str] = []
    move = sync._resharder.start

    def sleep(level: int) -> None:
        events.append(f"sleep {level}")
        parameters = engine.named_parameters()
        for name in sync._written - of_the_actor(model, parameters):
            parameters[name].detach().fill_(float("nan"))

    def start(final: FinalParts | None = None) -> None:
        events.append("reshard")
        move(final)

    engine._can_sleep = True
    with (
        patch.object(worker, "sleep", sleep),
        patch.object(
            worker, "wake_up", lambda tags: events.append(f"wake {' '.join(tags)}")
        ),
        patch.object(sync._resharder, "start", start),
        patch(
            "vllm.device_allocator.get_mem_allocator_instance",
            lambda: SimpleNamespace(pointer_to_data={}),
        ),
        patch.object(torch.cuda, "memory_snapshot", list),
    ):
        yield events
        engine.wake_up()
    engine._can_sleep = False


def versions(
    folder: str,
    other_folder: str,
    grid: dict[str, int],
    tp: int,
    prompts: list[list[int]],
    dtype: str,
) -> dict[str, Any]:
    """Answers with weights that are shared, then with such as move in the background, of either folder's model."""
    model = MegatronModel(
        ModelSpec.from_folder(folder),
        manager().grid(GridShape(**grid)),
        ModelOptions(dtype=torch.float32, seed=0),
    )
    model.load(folder)
    shared = ReshardConfig(check_every=1)
    with pool_watched(model) as adopted_in_pool:
        engine = VLLMEngine(
            folder,
            RolloutConfig(tp=tp),
            VLLMOptions(
                seed=0,
                dtype=getattr(torch, dtype),
                max_model_len=64,
                load_weights=False,
                num_sequences=16,
            ),
            on_load=adopting(model, default_group(), None, shared),
        )
    adopted = len(of_the_actor(model, engine.named_parameters()))
    layouts = engine.layouts(shapes_of(model.weights))

    def answer(rollout: Rollout) -> Any:
        sampling = SamplingOptions(max_tokens=8, temperature=0.0)
        try:
            return [
                asdict(found)
                for found in rollout.generate(prompts, sampling, [0] * len(prompts))
            ]
        except ReshardError as error:
            return str(error)

    sync = WeightSync(
        ActorWeights.of(model), layouts, engine, default_group(), config=shared
    )
    rollout = Rollout(engine, default_group(), sync)
    found = {
        "adopted": adopted,
        "adopted_in_pool": adopted_in_pool,
        "parameters": len(engine.named_parameters()),
        "unset": answer(rollout),
    }
    sync.reshard()
    found["first"] = answer(rollout)
    sync.source_changes()
    model.load(other_folder)
    found["between"] = answer(rollout)
    stats = sync.reshard()
    found |= {"second": answer(rollout), "stats": asdict(stats)}
    with sleeping(engine, model, sync) as events:
        sync.reshard()
        # The second without a reshard in between.
        for name in ("asleep", "asleep_again"):
            found[name] = answer(rollout)
        sync.source_changes()
        found["asleep_changed"] = answer(rollout)
        sync.reshard()
    found |= {"events": events, "asleep_version": rollout.weight_version}
    # overlap: the engine has storage of its own
    for parameter in engine.named_parameters().values():
        parameter.data = parameter.data.clone()
    overlapped = ReshardConfig(overlap=True, alias="never", check_every=1)
    sync = WeightSync(
        ActorWeights.of(model),
        layouts,
        engine,
        default_group(),
        config=overlapped,
        background=dist.new_group(),
    )
    rollout = Rollout(engine, default_group(), sync)
    sync.begin()
    found["began_early"] = sync.is_under_way
    sync.reshard()
    found["overlapped_second"] = answer(rollout)
    sync.begin()
    found["under_way"] = sync.is_under_way
    model.load(folder)
    sync.final()
    found["on_its_way"] = answer(rollout)
    sync.reshard()
    found |= {"overlapped_first": answer(rollout), "version": rollout.weight_version}
    engine.close()
    dist.barrier()
    return found
