"""A rank of a recipe, from its grid to a whole step and a save, with the memory and the numbers of the real model."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.testing._internal.distributed.fake_pg import FakeStore

from megaverl.checkpoint.background import HostBuffers, PendingTensors
from megaverl.checkpoint.commit import Committer
from megaverl.checkpoint.shards import StagedShards, Stager
from megaverl.checkpoint.training_state import sharded_state
from megaverl.config import Config, load_config
from megaverl.controller.messages import RowTransfer
from megaverl.controller.serving import run_blocking
from megaverl.data import row_transfer
from megaverl.data.batch import RolloutBatch
from megaverl.dataflow import value_mover
from megaverl.distributed.channels import Channel, PendingSends
from megaverl.distributed.job_context import JobContext
from megaverl.errors import ReshardError
from megaverl.models.architectures import weights_of
from megaverl.monitoring.timeline import Timeline
from megaverl.rollout import split_prompts
from megaverl.rollout.engine import Generation, OnLoad, Sampling, Shapes
from megaverl.rollout.vllm_weights import in_floating_point
from megaverl.sharding.layout import Layout
from megaverl.sharding.quantization import FORMATS
from megaverl.sharding.vllm import QuantisedWeight, vllm_layouts
from megaverl.sharding.weight import shapes_of
from megaverl.trainer.build import Builder
from megaverl.trainer.job import Stages, alone
from megaverl.trainer.roles import make_roles
from megaverl.trainer.run_state import RunState
from megaverl.trainer.sample_rows import Fields, RowMover, SampleRows, SampleStore
from megaverl.trainer.saving import sample_records
from megaverl.weights.transports import check_tensors
from megaverl.workers.fsdp_model import FSDPModel
from megaverl.workers.model import TrainingModel
from megaverl.workers.offload import storages_of
from megaverl.workers.optimizers import (
    FSDPTrainable,
    MegatronTrainable,
    local,
    optimizer_tensors,
)
from megaverl.workers.policy import Actor
from megaverl.workers.trainable import TrainableModel
from tests.cuda.device_mode import DeviceMode
from tests.cuda.fake_device import HostReads
from tests.cuda.others import OTHERS, response

CONFIGS = Path(__file__).parents[2] / "configs"
NUM_PROMPTS, GROUP_SIZE = 16, 4
LONGEST_PROMPT = 64  # tokens


def run(
    recipe: str,
    world: int,
    rank: int,
    stages: Sequence[str],
    overrides: Sequence[str] = (),
) -> dict[str, Any]:
    """Returns, by stage, and of a step by operator: what the host read of the device,
    and what it sent there, what was communicated ([calls, bytes]), processor seconds,
    and what the stage itself says.
    """
    local = rank % torch.cuda.device_count()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(local))
    torch.cuda.set_device(local)
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    mode = DeviceMode()
    found: dict[str, Any] = {}
    begin = 0.0

    def taken(name: str, says: Any = None) -> None:
        nonlocal begin
        found[name] = {
            "reads": HostReads.take(),
            "sent": HostReads.take_sent(),
            "unknown_waits": HostReads.take_unknown(),
            "collectives": mode.take_collectives(),
            "page_locked": mode.take_page_locked(),
            "seconds": time.process_time() - begin,
            "says": says,
        }
        begin = time.process_time()

    with tempfile.TemporaryDirectory() as folder, mode:
        job = RecipeRank(recipe, world, rank, Path(folder), overrides, taken)
        HostReads.take()
        HostReads.take_sent()
        HostReads.take_unknown()
        for name in stages:
            begin = time.process_time()
            says = getattr(job, name)()
            taken(name, says)
    return found


class Mail:
    """Messages between hosts that come back to the rank which has sent them."""

    def __init__(self) -> None:
        self._heads: list[Any] = []
        self._parts: list[list[torch.Tensor]] = []

    def send_json(
        self, context: JobContext, name: str, rank: int, head: Any
    ) -> PendingSends:
        self._heads.append(head)
        return PendingSends()

    def receive_json(self, context: JobContext, name: str, rank: int) -> Any:
        return self._heads.pop(0)

    def send_to(
        self, dest: Sequence[int], *parts: torch.Tensor | bytes
    ) -> PendingSends:
        as_bytes = (
            torch.frombuffer(bytearray(one), dtype=torch.uint8)
            if isinstance(one, bytes)
            else one
            for one in parts
        )
        self._parts.append(list(as_bytes))
        return PendingSends()

    def receive_from(self, source: int) -> list[torch.Tensor]:
        return self._parts.pop(0)


class RecipeRank:
    """Each method is a stage, of the real parts that a run makes there; they are called in this order.

    Args:
        taken: called with the name of a part of a stage that is over.
    """

    actor: Actor

    def __init__(
        self,
        recipe: str,
        world: int,
        rank: int,
        folder: Path,
        overrides: Sequence[str],
        taken: Callable[[str], None],
    ) -> None:
        path = CONFIGS / f"{recipe}.yaml"
        (folder / "config.json").write_bytes((path.parent / "config.json").read_bytes())
        _write_tokenizer(folder)
        _write_prompts(folder / "prompts.jsonl")
        given = [
            f"model.path={folder}",
            "model.init=random",
            "algorithm.num_mini_batches=1",
            "reward=exact_match",
        ]
        given += [f"data.train={folder / 'prompts.jsonl'}", "data.system_prompt=null"]
        given += [
            f"data.prompts_per_step={NUM_PROMPTS}",
            f"algorithm.group_size={GROUP_SIZE}",
        ]
        # The device holds no numbers that could be compared.
        given += ["reshard.check_every=-1", *overrides]
        self.config: Config = load_config(
            path, given, check_paths=False, world_size=world
        )
        # Drawn, weights would be whole on the host.
        if self.config.actor.engine == "fsdp":
            self.config = load_config(
                path,
                [*given, "model.init=weights"],
                check_paths=False,
                world_size=world,
            )
        self.rank, self._taken = rank, taken
        self.builder = RecipeBuilder(self.config)

    def build(self) -> dict[str, Any]:
        """The grid; the actor, whose names and shapes are the layout's, its gradients' buffers, its optimizer."""
        self.actor = self.builder.actor()
        return self._built()

    def _built(self) -> dict[str, Any]:
        model = self.actor.model
        check_tensors(
            model.layout_of(self.rank),
            model.parameters,
            "the model",
            ReshardError,
            exact=True,
        )
        return {
            "parameters": sum(
                parameter.numel() for parameter in model.parameters.values()
            ),
            "layers": sorted(
                {
                    type(module).__name__
                    for chunk in _modules(model)
                    for module in chunk.modules()
                }
            ),
            "packs": model.pack is not None,
            "devices": sorted(
                {str(parameter.device) for parameter in model.parameters.values()}
            ),
        }

    def start(self) -> dict[str, Any]:
        """All that a run makes on this rank: every role, the plans, the flow of a step."""
        job = alone(self.config)
        stages, context = Stages(Timeline(self.rank), job), job.context
        console: Any = SimpleNamespace(warn=print)
        roles = make_roles(self.builder, context, generates=True)
        self.state = RunState(self.config, roles, context, stages, console)
        assert isinstance(roles.actor, Actor) and roles.sync is not None
        self.actor = roles.actor
        self.state.prepare_updates({}, None)
        self.state.start(0)
        return self._built() | {"on_device": self._on_device()}

    def _on_device(self) -> dict[str, int]:
        """Bytes of the actor's storages that are not empty; and those of its optimizer's copies on the host."""
        trainable = self.actor.trainable
        parts = {
            "weights": self.actor.model.held,
            "gradients": trainable._gradient_buffers,
            "optimizer": _optimizer_state(trainable),
        }
        found = {
            name: sum(s.nbytes() for s in storages_of(tensors))
            for name, tensors in parts.items()
        }
        place = (
            trainable._optimizer_state._place
            if trainable._optimizer_state is not None
            else None
        )
        return found | {"pinned": getattr(place, "nbytes", 0)}

    def step(self) -> dict[str, Any]:
        """Every operator of the run's first step, from prompts to what is written down of it."""
        return self._step(0)

    def later_step(self) -> dict[str, Any]:
        """One that needs no old log-probs: its own forward pass gives them."""
        self.state.step.trust_engine()
        return self._step(1)

    def _step(self, number: int) -> dict[str, Any]:
        roles = self.state.roles
        engine: Any = roles.engines.engine
        sync: Any = roles.sync
        resharder = sync._resharder
        # taken for filled; the device holds no numbers, and 1 is read there as the
        # version of all ranks' weights
        resharder.version, resharder.inconsistent = 0, None
        count = NUM_PROMPTS * GROUP_SIZE
        shares = split_prompts([1] * count, engine.num_replicas, GROUP_SIZE)
        writers = {
            row: replica * engine.tp_size
            for replica, share in enumerate(shares)
            for row in share
        }
        OTHERS.begin([writers[row] for row in range(count)])

        state, operators = self.state, self.state.step
        state.begin_step(number)
        operators.begin(number, 0.0)
        values: dict[str, Any] = {
            "prompts": self.builder.prompts().take(operators.num_prompts),
            "step": number,
        }
        for operator in state.flow.plan.operators:
            with state.stages(operator.name):
                values |= operator(values)
            self._taken(f"step: {operator.name}")
        state.keep_samples(values["rollouts"], values["scores"])
        state.end_step(number)
        measured = self.state.measured(number + 1)
        assert measured is not None
        json.dumps(measured.metrics)
        if self.rank == 0:  # it keeps the run's records
            json.dumps(
                sample_records(measured.rollouts, measured.scores, roles.reward, 2)
            )
        return {
            "metrics": sorted(measured.metrics),
            "held": len(measured.rollouts),
            "received": OTHERS.received,
            "reshard": {
                "received": measured.metrics["reshard/bytes_received"],
                "local": measured.metrics["reshard/bytes_local"],
                "wanted": engine.layout.numel * self.builder.dtype.itemsize,
                "aliased": self._aliased(engine.named_parameters()),
            },
            "on_device": self._on_device(),
            "trained": _num_trained(self.actor.trainable),
        }

    def edge(self) -> dict[str, Any]:
        """Results of a step from this rank to another that is not there yet, and from
        there to this one, as between roles on ranks of their own: fields of a batch,
        and a tensor of an operator's own.
        """
        context = alone(self.config).context
        other = (self.rank + 1) % dist.get_world_size()
        batch = RolloutBatch.from_generations(
            [[1, 2]] * 4, [response(number) for number in range(4)]
        )
        values = torch.zeros(batch.response_shape, device="cuda")
        store = SampleStore(context, None)
        fields: dict[str, Fields] = {
            "values": {"values": values},
            "experience": {
                "advantages": values,
                "returns": values + 1,
                "rewards": torch.ones(4),
            },
        }
        given: list[object] = [
            store.give_fields(each, batch) for each in fields.values()
        ]
        given.append({"of": values.sum(1)})
        mover, mail, found = RowMover(context), Mail(), dict[str, Any]()
        with (
            patch.object(value_mover, "send_json", mail.send_json),
            patch.object(row_transfer, "send_json", mail.send_json),
            patch.object(value_mover, "receive_json", mail.receive_json),
            patch.object(Channel, "send_to", mail.send_to),
            patch.object(Channel, "receive_from", mail.receive_from),
        ):
            for number, value in enumerate(given):
                rows = tuple(range(4)) if isinstance(value, SampleRows) else None
                run_blocking(
                    mover.send(RowTransfer(number, self.rank, other, rows), value)
                )
                came = run_blocking(
                    mover.receive(RowTransfer(number, other, self.rank, rows), None)
                )
                found |= came.ragged.tensors if isinstance(came, SampleRows) else came  # type: ignore[operator]
        return {
            "devices": {name: str(tensor.device) for name, tensor in found.items()},
            "tokens": int(batch.response_lengths.sum()),
            "samples": len(batch),
        }

    def reshard(self) -> dict[str, int]:
        """The plan to the engine's layout, and all that its transports send, receive and copy."""
        engine = RecipeEngine(self.config, self.builder, self.rank)
        sync = self.builder.rollout(self.actor.model, engine).sync
        assert sync is not None
        sync.start()
        stats = sync.finish()
        wanted = engine.layout.numel * self.builder.dtype.itemsize
        aliased = self._aliased(engine.named_parameters())
        return {
            "received": stats.bytes_received,
            "local": stats.bytes_local,
            "aliased": aliased,
            "wanted": wanted,
        }

    def _aliased(self, parameters: Mapping[str, torch.Tensor]) -> int:
        """Bytes of an engine's parameters that are the actor's own storage."""
        own = {storage.data_ptr() for storage in storages_of(self.actor.model.held)}
        return sum(
            each.nbytes
            for each in parameters.values()
            if each.untyped_storage().data_ptr() in own
        )

    def save(self) -> dict[str, int]:
        """What the rank would write of a checkpoint, planned and staged; a few tensors
        of it go from the device into files, and into the copies that are taken before
        an update.
        """
        with self.actor.trainable.present():
            staged = Stager().stage(
                sharded_state({"actor": self.actor.trainable}), committer=Committer()
            )
            held = _num_trained(self.actor.trainable)
            few = _smallest(staged)
            with tempfile.TemporaryDirectory() as folder:
                written, _ = few.write(Path(folder))
            tensors = {
                item.index: staged.data[item.index]
                for item in few.plan.items
                if item.type.name != "BYTE_IO"
            }
            PendingTensors(tensors, {}, HostBuffers()).settle()
        return {
            "bytes": staged.num_bytes,
            "trained": held,
            "tensors": len(tensors),
            "files": len(written),
        }


def _modules(model: TrainingModel) -> Sequence[torch.nn.Module]:
    return [model.module] if isinstance(model, FSDPModel) else model.chunks[:1]  # type: ignore[attr-defined]


def _optimizer_state(trainable: TrainableModel) -> list[torch.Tensor]:
    if isinstance(trainable, FSDPTrainable):
        return trainable._state
    assert isinstance(trainable, MegatronTrainable)
    return list(optimizer_tensors(trainable.optimizer))


def _num_trained(trainable: TrainableModel) -> int:
    """Elements of this rank's weights that are trained."""
    if isinstance(trainable, FSDPTrainable):
        return sum(local(parameter).numel() for parameter in trainable.parameters)
    return sum(buffer.numel() for buffer in trainable._gradient_buffers)


class RecipeBuilder(Builder):
    """As a run has it, but for the engine, and for files of weights, whose place on the device is filled."""

    def files(self, path: str | None = None) -> Any:
        return SimpleNamespace(
            folder=Path(self.config.model.path), arriving=lambda: None
        )

    def model(self, *args: Any, **options: Any) -> TrainingModel:
        FSDPModel.load = lambda model, *files: None  # type: ignore[method-assign]
        return super().model(*args, **options)

    def _engine(self, *, weights_come: bool, on_load: OnLoad | None) -> Any:
        engine = RecipeEngine(self.config, self, dist.get_rank())
        if on_load is not None:
            on_load(engine.named_parameters(), engine.layouts)
        return engine


class RecipeEngine:
    """An engine's parameters on this rank, as vLLM's layout has them, and answers that follow from their numbers."""

    may_rebind = False
    in_flight = on_finished = None

    def __init__(self, config: Config, builder: Builder, rank: int) -> None:
        self.tp_size = config.rollout.tp
        self.replica, self.tp_rank = divmod(rank, self.tp_size)
        self.num_replicas = dist.get_world_size() // self.tp_size
        self._config = config.rollout
        self._spec = builder.spec
        self.layout = layout = self.layouts(shapes_of(weights_of(builder.spec)))(rank)
        self._quantised = {
            name: _quantised(layout.local_shapes[name], FORMATS[form])
            for name, form in layout.quantised.items()
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
            expert_placement=self._config.vllm.get(
                "expert_placement_strategy", "linear"
            ),
            quantization=self._config.vllm.get("quantization"),
        )

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Generation]:
        mine = [
            number
            for number, rank in enumerate(OTHERS.writers)
            if rank == self.replica * self.tp_size
        ]
        assert len(mine) == len(prompts)
        return [response(number) for number in mine]

    def nothing(self) -> None: ...

    reset_prefix_cache = sleep = wake_weights = wake_up = close = nothing

    def sleep_without(self, names: Collection[str]) -> bool:
        """They are dropped, and woken before the reshard writes all of them."""
        return True

    def quantised_weights(self) -> dict[str, QuantisedWeight]:
        return self._quantised


def _quantised(shape: tuple[int, ...], form: Any) -> QuantisedWeight:
    *experts, rows, columns = shape
    whole = experts and form.block is None
    of_one = () if whole else form.scale_shape(rows, columns)
    return QuantisedWeight(
        torch.empty(shape, dtype=torch.float8_e4m3fn, device="cuda"),
        torch.empty((*experts, *of_one), dtype=torch.float32, device="cuda"),
        form.block,
    )


def _smallest(staged: StagedShards) -> StagedShards:
    """What is written of it in a moment, from the device: its objects, and the smallest tensors of each dtype."""
    kinds: dict[Any, list[Any]] = {}
    for item in staged.plan.items:
        value = staged.data[item.index]
        kinds.setdefault(
            value.dtype if isinstance(value, torch.Tensor) else None, []
        ).append((value, item))
    objects = [item for _, item in kinds.pop(None, [])]
    tensors = [
        item
        for each in kinds.values()
        for _, item in sorted(each, key=lambda one: one[0].nbytes)[:4]
    ]
    return replace(staged, plan=replace(staged.plan, items=[*tensors, *objects]))


def _write_tokenizer(folder: Path) -> None:
    words = {"<unk>": 0, "<eos>": 1, "a": 2}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(described))


def _write_prompts(path: Path) -> None:
    """Of different lengths."""
    rows = (
        {"problem": "a " * (8 + 11 * n % (LONGEST_PROMPT - 8)), "answer": "a"}
        for n in range(NUM_PROMPTS)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
