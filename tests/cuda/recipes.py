"""What a rank of a recipe does, from its grid to a save, with the memory and the numbers of the real model."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models
from torch.testing._internal.distributed.fake_pg import FakeStore

from megaverl.checkpoint.background import HeldTensors, HostBuffers
from megaverl.checkpoint.commit import Committer
from megaverl.checkpoint.shards import StagedShards, Stager
from megaverl.checkpoint.training_state import sharded_state
from megaverl.config import Config, load_config
from megaverl.data.batch import RolloutBatch
from megaverl.errors import ReshardError
from megaverl.models.architectures import weights_of
from megaverl.rollout.engine import Shapes
from megaverl.rollout.vllm_quantised import in_floating_point
from megaverl.sharding.layout import Layout
from megaverl.sharding.quantised import QuantisedWeight, scale_shape
from megaverl.sharding.vllm import vllm_layouts
from megaverl.sharding.weight import shapes_of
from megaverl.trainer.build import Builder
from megaverl.weights.transfer import check_tensors
from megaverl.workers.policy import Actor
from tests.cuda.device_mode import DeviceMode
from tests.cuda.fake_device import HostReads

CONFIGS = Path(__file__).parents[2] / "configs"
NUM_PROMPTS, GROUP_SIZE = 16, 4
PROMPT, RESPONSE = 64, 128  # tokens, at most


def run(recipe: str, world: int, rank: int, stages: Sequence[str], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Returns, by stage: what the host read of the device, what was communicated ([calls, bytes]), processor seconds,
    and what the stage itself says."""
    local = rank % torch.cuda.device_count()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(local))
    torch.cuda.set_device(local)
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    mode = DeviceMode()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, mode:
        job = RecipeRank(recipe, world, rank, Path(folder), overrides)
        HostReads.take()
        HostReads.take_unknown()
        for name in stages:
            begin = time.process_time()
            says = getattr(job, name)()
            found[name] = {
                "reads": HostReads.take(),
                "unknown_waits": HostReads.take_unknown(),
                "collectives": mode.take_collectives(),
                "seconds": time.process_time() - begin,
                "says": says,
            }
    return found


class RecipeRank:
    """Each method is a stage, of the real parts that a run makes there; they are called in this order."""

    actor: Actor
    batch: RolloutBatch

    def __init__(self, recipe: str, world: int, rank: int, folder: Path, overrides: Sequence[str]) -> None:
        path = CONFIGS / f"{recipe}.yaml"
        (folder / "config.json").write_bytes((path.parent / "config.json").read_bytes())
        _write_tokenizer(folder)
        given = [f"model.path={folder}", "model.init=random", "algorithm.num_mini_batches=1"]
        given += ["reshard.check_every=-1", *overrides]  # the device holds no numbers that could be compared
        self.config: Config = load_config(path, given, check_paths=False, world_size=world)
        self.rank = rank

    def build(self) -> dict[str, Any]:
        """The grid; the actor, whose names and shapes are the layout's, its gradients' buffers, its optimizer."""
        self.builder = Builder(self.config)
        self.actor = self.builder.actor()
        model = self.actor.model
        check_tensors(model.layout_of(self.rank), model.parameters, "the model", ReshardError, exact=True)
        return {
            "parameters": sum(parameter.numel() for parameter in model.parameters.values()),
            "layers": sorted({type(module).__name__ for module in model.chunks[0].modules()}),
            "packs": model.pack is not None,
            "devices": sorted({str(parameter.device) for parameter in model.parameters.values()}),
        }

    def reference(self) -> None:
        """A second model, whose weights go to pinned memory at once."""
        self.builder.reference(self.actor.model)

    def log_probs(self) -> None:
        self.batch = _batch(self.builder.spec.vocab_size)
        self.actor.log_probs(self.batch)

    def update(self) -> None:
        """Forward, backward, the optimizer's step."""
        like = torch.ones(self.batch.response_mask.shape)
        batch = self.batch.with_(advantages=like, old_log_probs=-like, ref_log_probs=-like)
        self.actor.update(batch, step=0, kl_coef=0.1)

    def critic(self) -> None:
        critic, like = self.builder.critic(), torch.ones(self.batch.response_mask.shape)
        critic.values(self.batch)
        critic.update(self.batch.with_(values=like, returns=like), step=0)

    def reshard(self) -> dict[str, int]:
        """The plan to the engine's layout, and all that its transports send, receive and copy."""
        engine = EngineParameters(self.config, self.builder, self.rank)
        sync = self.builder.rollout(self.actor.model, engine).sync
        assert sync is not None
        sync.start()
        stats = sync.finish()
        wanted = engine.layout.numel * self.builder.dtype.itemsize
        return {"received": stats.bytes_received, "local": stats.bytes_local, "wanted": wanted}

    def save(self) -> dict[str, int]:
        """What the rank would write of a checkpoint, planned and staged; a few tensors of it go from the device into
        files, and into the copies that are taken before an update."""
        staged = Stager().stage(sharded_state({"actor": self.actor.trainable}), committer=Committer())
        held = sum(buffer.grad_data.numel() for buffer in self.actor.trainable._buffers)
        few = _smallest(staged)
        with tempfile.TemporaryDirectory() as folder:
            written, _ = few.write(Path(folder))
        tensors = {item.index: staged.data[item.index] for item in few.plan.items if item.type.name != "BYTE_IO"}
        HeldTensors(tensors, {}, HostBuffers()).settle()
        return {"bytes": staged.num_bytes, "trained": held, "tensors": len(tensors), "files": len(written)}


class EngineParameters:
    """An engine's parameters on this rank, as vLLM's layout has them, and nothing that generates."""

    may_rebind = False
    in_flight = told = None

    def __init__(self, config: Config, builder: Builder, rank: int) -> None:
        self.tp_size = config.rollout.tp
        self.replica, self.tp_rank = divmod(rank, self.tp_size)
        self.num_replicas = dist.get_world_size() // self.tp_size
        self._config = config.rollout
        self._spec = builder.spec
        self.layout = layout = self.layouts(shapes_of(weights_of(builder.spec)))(rank)
        self._quantised = {
            name: _quantised(layout.local_shapes[name], block) for name, block in layout.quantised.items()
        }
        self._parameters = in_floating_point(self._quantised, builder.dtype) | {
            name: torch.empty(shape, dtype=builder.dtype, device="cuda")
            for name, shape in layout.local_shapes.items()
            if name not in layout.quantised
        }

    def named_parameters(self) -> dict[str, torch.Tensor]:
        return self._parameters

    def layouts(self, shapes: Shapes) -> Callable[[int], Layout]:
        """As vLLM's rules have them: there is no vLLM for CUDA here whose loader could be asked."""
        return vllm_layouts(
            weights_of(self._spec),
            self._spec,
            self.tp_size,
            expert_parallel=bool(self._config.vllm.get("enable_expert_parallel")),
            expert_placement=self._config.vllm.get("expert_placement_strategy", "linear"),
            quantization=self._config.vllm.get("quantization"),
        )

    def nothing(self) -> None: ...

    reset_prefix_cache = sleep = wake_weights = wake_up = close = nothing

    def sleep_without(self, names: Collection[str]) -> bool:
        """They are dropped, and woken before the reshard writes all of them."""
        return True

    def quantised_weights(self) -> dict[str, QuantisedWeight]:
        return self._quantised


def _quantised(shape: tuple[int, ...], block: int | None) -> QuantisedWeight:
    *experts, rows, columns = shape
    of_one = () if experts and block is None else scale_shape(rows, columns, block)
    return QuantisedWeight(
        torch.empty(shape, dtype=torch.float8_e4m3fn, device="cuda"),
        torch.empty((*experts, *of_one), dtype=torch.float32, device="cuda"),
        block,
    )


def _smallest(staged: StagedShards) -> StagedShards:
    """What is written of it in a moment, from the device: its objects, and the smallest tensors of each dtype."""
    kinds: dict[Any, list[Any]] = {}
    for item in staged.plan.items:
        value = staged.data[item.index]
        kinds.setdefault(value.dtype if isinstance(value, torch.Tensor) else None, []).append((value, item))
    objects = [item for _, item in kinds.pop(None, [])]
    tensors = [item for each in kinds.values() for _, item in sorted(each, key=lambda one: one[0].nbytes)[:4]]
    return replace(staged, plan=replace(staged.plan, items=[*tensors, *objects]))


def _write_tokenizer(folder: Path) -> None:
    words = {"<unk>": 0, "<eos>": 1, "a": 2}
    Tokenizer(models.WordLevel(words, unk_token="<unk>")).save(str(folder / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))


def _batch(vocab_size: int) -> RolloutBatch:
    """Samples of different lengths, several to each prompt."""
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    prompts = draw(8, PROMPT, NUM_PROMPTS)
    ids = draw(0, vocab_size, NUM_PROMPTS, PROMPT) * (torch.arange(PROMPT) < prompts[:, None])
    count = NUM_PROMPTS * GROUP_SIZE
    lengths = draw(8, RESPONSE, count)
    mask = torch.arange(RESPONSE) < lengths[:, None]
    return RolloutBatch(
        {
            "input_ids": ids.repeat_interleave(GROUP_SIZE, dim=0),
            "prompt_lengths": prompts.repeat_interleave(GROUP_SIZE),
            "generated_ids": draw(0, vocab_size, count, RESPONSE) * mask,
            "response_lengths": lengths,
            "response_mask": mask,
            "rollout_log_probs": -torch.ones(count, RESPONSE) * mask,
        }
    )
