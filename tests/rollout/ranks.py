"""What the ranks do in tests/rollout/test_vllm_engine.py. An engine is kept from one test to the next."""

from __future__ import annotations

import gc
import logging.handlers
import os
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from megaverl.announcements import announcements
from megaverl.config.roles import RolloutConfig
from megaverl.distributed.job_context import default_group
from megaverl.errors import RolloutError
from megaverl.models.architectures import weights_of
from megaverl.models.draft_head import HEADS
from megaverl.platform import platform
from megaverl.rollout import EngineOptions, make_engine
from megaverl.rollout.engine import (
    Generation,
    InFlight,
    Sampling,
    SamplingOptions,
    SavedWork,
)
from megaverl.rollout.vllm_engine import VLLMEngine
from megaverl.rollout.vllm_options import VLLMOptions
from megaverl.sharding.model_spec import ModelSpec
from megaverl.sharding.weight import shapes_of
from megaverl.weights.load import load_folder
from megaverl.workers.rollout import Rollout

_kept: dict[str, Any] = {}


def engine(
    folder: str, tp: int, *, load_weights: bool = True, **vllm: Any
) -> VLLMEngine:
    """The engine of these arguments: the one in place, or a new one in its stead."""
    key = repr((folder, tp, load_weights, vllm))
    if _kept.get("key") != key:
        close()
        _kept["engine"] = VLLMEngine(
            folder,
            RolloutConfig(tp=tp, vllm=vllm),
            VLLMOptions(
                seed=0,
                dtype=torch.float32,
                max_model_len=128,
                stop_token_ids=(1,),
                load_weights=load_weights,
                num_sequences=16,
            ),
        )
        _kept["key"] = key
    found: VLLMEngine = _kept["engine"]
    return found


def cache_tokens(folder: str, **vllm: Any) -> dict[str, Any]:
    """The tokens that an engine's cache holds where vLLM may take 1 GiB, and what is announced."""
    from megaverl.platform import vllm_cpu

    close()
    told = logging.handlers.BufferingHandler(100)
    defaults = vllm_cpu.engine_defaults

    def without_size(**sizes: Any) -> dict[str, Any]:
        return {
            name: value
            for name, value in defaults(**sizes).items()
            if name != "kv_cache_memory_bytes"
        }

    announcements.addHandler(told)
    announcements.setLevel(logging.INFO)
    with (
        patch.object(vllm_cpu, "engine_defaults", without_size),
        patch.dict(os.environ, VLLM_CPU_KVCACHE_SPACE="1"),
    ):
        scheduler = engine(folder, 1, **vllm)._scheduler
    announcements.removeHandler(told)
    blocks = scheduler.kv_cache_manager.block_pool.num_gpu_blocks
    close()
    return {
        "tokens": blocks * scheduler.block_size,
        "block": scheduler.block_size,
        "told": [record.getMessage() for record in told.buffer],
    }


def close() -> None:
    if "engine" in _kept:
        _kept.pop("engine").close()
        _kept.pop("key")


def answers(
    engine: VLLMEngine,
    prompts: list[list[int]],
    seeds: list[int],
    sampling: dict[str, Any] | list[dict[str, Any]],
) -> list[dict[str, Any]]:
    ways: Sampling = (
        [SamplingOptions(**way) for way in sampling]
        if isinstance(sampling, list)
        else SamplingOptions(**sampling)
    )
    heard: dict[int, Generation] = {}
    engine.on_finished = heard.__setitem__
    found = engine.generate(prompts, ways, seeds)
    engine.on_finished = None
    assert heard == dict(enumerate(found)), (
        "each response is told of once, when it is finished"
    )
    return [asdict(one) for one in found]


def generate(
    folder: str, tp: int, requests: list[dict[str, Any]]
) -> list[list[dict[str, Any]]]:
    """The answers to several calls of `generate`."""
    return [answers(engine(folder, tp), **request) for request in requests]


def fill(made: VLLMEngine, folder: str) -> None:
    """Write the weights of a folder into an engine, as a reshard does."""
    weights = weights_of(ModelSpec.from_folder(folder))
    load_folder(
        folder,
        made.layouts(shapes_of(weights))(dist.get_rank()),
        made.named_parameters(),
        weights=weights,
    )
    made.reset_prefix_cache()


def speculate(
    folder: str,
    tp: int,
    speculation: dict[str, Any],
    requests: list[dict[str, Any]],
    many: dict[str, Any],
) -> dict[str, Any]:
    """The answers of an engine with a speculator, whose weights are written into it; to
    `many` as tokens alone; what became of its drafts.
    """
    threads = torch.get_num_threads()
    made = engine(folder, tp, load_weights=False, speculative_config=speculation)
    fill(made, folder)
    found = [answers(made, **request) for request in requests]
    made.saved_work = SavedWork()
    drawn = made.generate(
        many["prompts"], SamplingOptions(**many["sampling"]), many["seeds"]
    )
    assert torch.get_num_threads() == threads, (
        "a search for drafts leaves OpenMP's threads as they are"
    )
    return {
        "answers": found,
        "many": [one.token_ids for one in drawn],
        "work": asdict(made.saved_work),
    }


def head_against_vllm(folder: str, method: str, head: str, prompt: list[int]) -> float:
    """Largest difference between the states of a head in vLLM, in its first three steps, and as it is trained."""
    speculation = {"method": method, "model": head, "num_speculative_tokens": 3}
    made = engine(folder, 1, speculative_config=speculation)
    in_vllm = made._runner.get_draft_model()
    # Equal, as an EAGLE-3 head is new, and yet not shared: a reshard will write each.
    output_layers = made.model.lm_head.weight, in_vllm.lm_head.weight
    assert torch.equal(*output_layers)
    assert (output_layers[0] is output_layers[1]) == (method == "mtp")
    forward = in_vllm.forward
    observed: list[torch.Tensor] = []
    calls: list[tuple[torch.Tensor, torch.Tensor]] = []

    def observe(states: torch.Tensor) -> Any:
        observed.append(states.clone())
        return combine(states)

    def step(input_ids: torch.Tensor, *args: Any, **options: Any) -> Any:
        if method == "mtp":
            observed.append(options["hidden_states"].clone())
        states = forward(input_ids, *args, **options)
        output = states if method == "mtp" else states[0]
        calls.append((input_ids.clone(), output.clone()))
        return states

    in_vllm.forward = step
    if method == "eagle3":
        combine = in_vllm.combine_hidden_states
        in_vllm.combine_hidden_states = observe
    made.generate([prompt], SamplingOptions(max_tokens=4, temperature=0.0), [0])
    trained = HEADS[method].from_pretrained(head)
    (first, states), (second, later), (third, last) = calls[:3]
    tokens = torch.cat([torch.tensor(prompt[:1]), first, second, third])
    with torch.no_grad():
        embeddings = made.model.model.embed_tokens(tokens)
        aux = torch.nn.functional.pad(observed[0], (0, 0, 0, 3))
        steps = trained(torch.cat([embeddings, aux], dim=-1)[None], 3)[:, 0]
    count = len(prompt)
    assert len(first) == len(observed[0]) == count and len(second) == len(third) == 1
    pairs = (
        (steps[0, :count], states),
        (steps[1, count - 1], later[0]),
        (steps[2, count - 1], last[0]),
    )
    if method == "mtp":
        # The states after the target's last norm, as `observe` takes them.
        target = AutoModelForCausalLM.from_pretrained(folder).model
        after_norm = target(torch.tensor([prompt])).last_hidden_state[0].detach()
        pairs += ((after_norm, observed[0]),)
    close()
    return max(float((a - b).abs().max()) for a, b in pairs)


def refusal(
    folder: str,
    tp: int,
    vllm: dict[str, Any] | None = None,
    request: dict[str, Any] | None = None,
) -> str:
    """The message of the error that making an engine, or asking it, ends in."""
    try:
        made = engine(folder, tp, **(vllm or {}))
        if request is not None:
            answers(made, **request)
    except RolloutError as error:
        return str(error)
    return "no error"


def ranks_that_disagree(folder: str) -> str:
    prompt = [3, 4, 5 + dist.get_rank()]
    return refusal(
        folder,
        2,
        request={"prompts": [prompt], "seeds": [0], "sampling": {"max_tokens": 2}},
    )


def change_weights(
    folder: str, other_folder: str, tp: int, request: dict[str, Any]
) -> dict[str, Any]:
    """Answers with the weights of `folder`, then with those of `other_folder` written in place over them."""
    made = engine(folder, tp)
    spec = ModelSpec.from_folder(folder)
    weights = weights_of(spec)
    layout = made.layouts(shapes_of(weights))(dist.get_rank())
    before = answers(made, **request)
    places = {
        name: parameter.data_ptr()
        for name, parameter in made.named_parameters().items()
    }
    load_folder(other_folder, layout, made.named_parameters(), weights=weights)
    made.reset_prefix_cache()
    after = answers(made, **request)
    load_folder(folder, layout, made.named_parameters(), weights=weights)
    made.reset_prefix_cache()
    return {
        "before": before,
        "after": after,
        "again": answers(made, **request),
        "in_place": places
        == {
            name: parameter.data_ptr()
            for name, parameter in made.named_parameters().items()
        },
    }


def unset_then_filled(folder: str, tp: int, request: dict[str, Any]) -> dict[str, Any]:
    """What an engine made without weights says before, and answers after they are written into it."""
    made = engine(folder, tp, load_weights=False)
    try:
        refusal = str(answers(made, **request))
    except RolloutError as error:
        refusal = str(error)
    fill(made, folder)
    return {"refusal": refusal, "filled": answers(made, **request)}


def looked_at_elsewhere(folder: str) -> int:
    """On a machine that vLLM never saw: how often a new engine looks at a model's class in another process."""
    from unittest.mock import patch

    from vllm.model_executor.models import registry

    close()
    registry._try_inspect_model_cls.cache_clear()
    lazy, elsewhere = registry._LazyRegisteredModel, registry._run_in_subprocess
    with (
        patch.object(
            lazy, "_load_modelinfo_from_cache", lambda self, module_hash: None
        ),
        patch.object(registry, "_run_in_subprocess", wraps=elsewhere) as run,
    ):
        engine(folder, 1)
    return run.call_count


def reset_while_running(folder: str) -> str:
    from vllm import SamplingParams

    made = engine(folder, 1)
    core = made.llm.llm_engine
    core.add_request(
        "held",
        {"prompt_token_ids": [3, 4, 5]},
        SamplingParams(max_tokens=50, detokenize=False),
    )
    core.step()
    try:
        made.reset_prefix_cache()
    except RolloutError as error:
        return str(error)
    finally:
        core.abort_request(["held"])
        while core.has_unfinished_requests():
            core.step()
    return "no error"


def state_around(folder: str) -> dict[str, Any]:
    """What making an engine, generating and closing it leave changed in the process."""
    close()
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)

    def state() -> dict[str, Any]:
        return {
            "python": repr(random.getstate()),
            "numpy": np.random.get_state()[1].tolist(),  # type: ignore[union-attr]
            "torch": torch.get_rng_state().tolist(),
            "set_num_threads": torch.set_num_threads.__module__,
            "environment": {
                name: os.environ.get(name)
                for name in ("LD_PRELOAD", "LOCAL_WORLD_SIZE")
            },
            # Of what is frozen some ends by itself.
            "imports are frozen": gc.get_freeze_count() > 100_000,
        }

    before = state()
    made = engine(folder, 1)
    after_start = state()
    answers(made, [[3, 4], [5]], [0, 1], {"max_tokens": 4})
    after_generate = state()
    close()
    after_close = state()
    return {
        "start": [name for name in before if before[name] != after_start[name]],
        "generate": [name for name in before if before[name] != after_generate[name]],
        "close": [name for name in before if before[name] != after_close[name]],
    }


def after_close(folder: str) -> dict[str, Any]:
    made = engine(folder, 2)
    dist.barrier()  # the first rank's engine is there too
    queue = [
        line
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "/dev/shm/psm_" in line
    ]
    folders = {
        os.path.dirname(connection.laddr)
        for connection in psutil.Process().net_connections("unix")
        if connection.laddr.startswith("/")
    }
    close()
    try:
        made.named_parameters()
        message = "no error"
    except RolloutError as error:
        message = str(error)
    total = torch.ones(1)
    dist.all_reduce(total)
    left = [file.name for file in Path("/dev/shm").glob("megaverl-*")]
    return {
        "message": message,
        "world": int(total),
        "shared_memory": left,
        "queue": [len(queue), sum(not line.endswith("(deleted)") for line in queue)],
        "sockets": sorted(folders),
        "temporary": os.environ["TMPDIR"],
    }


def budgets(folder: str) -> dict[str, Any]:
    """Of engines that go by free memory, where rank 1 says that it shares its node's with seven others."""
    before = os.environ["LOCAL_WORLD_SIZE"]
    os.environ["LOCAL_WORLD_SIZE"] = str(1 + 7 * dist.get_rank())
    engine = make_engine(
        RolloutConfig(engine="hf", use_dynamic_batching=True, max_sequences=3),
        folder,
        EngineOptions(seed=0, dtype=torch.float32, max_model_len=32),
    )
    try:
        rollout = Rollout(engine, default_group())
        answers = rollout.generate(
            [[5, 6, 7]] * 4, SamplingOptions(max_tokens=4), range(4)
        )
        assert engine.in_flight is not None
        return {
            "free": platform.free_memory(),
            "budget": engine.in_flight.budget,
            "number": engine.in_flight.number,
            "answers": [asdict(answer) for answer in answers],
        }
    finally:
        os.environ["LOCAL_WORLD_SIZE"] = before


def generate_few_at_once(
    folder: str, tp: int, request: dict[str, Any], most: int
) -> dict[str, Any]:
    """The same answers with at most so many at once, and how many there ever were."""
    one = engine(folder, tp)
    free = answers(one, **request)
    scheduler: Any = one.llm.llm_engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
    schedule, seen = scheduler.schedule, [0]

    def watched(*given: Any, **named: Any) -> Any:
        output = schedule(*given, **named)
        seen.append(len(scheduler.running))
        return output

    scheduler.schedule, one.in_flight = watched, InFlight(1, most)
    before = scheduler.max_num_active_reqs
    try:
        found = answers(one, **request)
        return {
            "same": found == free,
            "most": max(seen),
            "number": one.in_flight.number,
        }
    finally:
        scheduler.schedule, one.in_flight, scheduler.max_num_active_reqs = (
            schedule,
            None,
            before,
        )
