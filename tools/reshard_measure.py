"""One rank of `bench_reshard.py`: build both ends of a pair, check every way of moving weights, measure all in turn."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import datetime
import gc
import json
import math
import os
import re
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

# A checkout needs no installation of megaverl.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megaverl.config.fsdp import FsdpConfig
from megaverl.distributed.collectives import gather_json, on_first_rank
from megaverl.distributed.grid import GridShape
from megaverl.distributed.groups import ProcessGroupManager
from megaverl.monitoring.console import redirect_output
from megaverl.platform import platform
from megaverl.platform.vllm_cpu import unique_shared_memory
from megaverl.sharding.boxes import whole
from megaverl.sharding.layout import Layout
from megaverl.sharding.model_spec import ModelSpec
from megaverl.sharding.plan import Plan, make_plan
from megaverl.sharding.vllm import vllm_layouts
from megaverl.weights.fingerprint import ReshardCheck, box_fingerprint
from megaverl.weights.reshard import Resharder
from megaverl.weights.transports import TransportOptions, view
from megaverl.workers.fsdp_model import FSDPModel
from megaverl.workers.megatron_model import MegatronModel
from megaverl.workers.model import TrainingModel
from megaverl.workers.model_options import ModelOptions
from tools.reshard_peers import Bridge, CoreResharding, FullTensors, PlainExchange

LayoutOf = Callable[[int], Layout]
Tensors = Mapping[str, torch.Tensor]

MB = 2**20
# Source and destination; a pipeline of one stage and one data replica are left out of a
# name. fsdp2dp2: two replicas, each cut over two ranks.
PAIRS = (
    "tp2pp2-vllm2",
    "tp2pp2-vllm1",
    "tp1pp4-vllm2",
    "tp4-vllm2",
    "tp2dp2-vllm2",
    "tp2pp2-tp2dp2",
    "tp2pp2-tp1dp4",
    "tp1pp4-tp2dp2",
    "fsdp4-vllm2",
    "fsdp4-vllm1",
    "fsdp2dp2-vllm2",
)


@dataclasses.dataclass(frozen=True)
class Job:
    """Sizes of the model, and settings of the measurement."""

    layers: int = 24
    hidden: int = 896
    ffn: int = 4864
    heads: int = 14
    kv_heads: int = 2
    vocab: int = 151936
    repeats: int = 5
    bucket_mb: int = 64
    bridge_bucket_mb: int = 512
    nproc: int = 4
    pairs: tuple[str, ...] = PAIRS

    def sized_for(self, tp_sizes: Sequence[int]) -> Job:
        """Return this model, or the nearest one of the same width and head size whose heads all `tp_sizes` divide."""
        most = max(tp_sizes)
        if all(self.heads % tp == 0 and self.kv_heads % tp == 0 for tp in tp_sizes):
            return self
        head_dim = self.hidden // self.heads
        heads = -(-self.heads // most) * most
        return dataclasses.replace(
            self,
            heads=heads,
            kv_heads=max(self.kv_heads, most),
            hidden=heads * head_dim,
        )

    def __str__(self) -> str:
        return (
            f"Qwen2 of {self.layers} layers, hidden {self.hidden}, ffn {self.ffn}, {self.heads}/{self.kv_heads} "
            f"heads of {self.hidden // self.heads}, vocabulary {self.vocab:,}, tied, bfloat16"
        )


@dataclasses.dataclass(frozen=True)
class End:
    """One end of a pair: a Megatron grid, shards and replicas of FSDP2, or vLLM at a tensor-parallel size."""

    engine: str
    tp: int
    pp: int = 1
    dp: int = 1
    shards: int = 1

    @classmethod
    def parse(cls, text: str, nproc: int) -> End:
        if match := re.fullmatch(r"vllm(\d+)", text):
            end = cls("vllm", int(match[1]), 1, nproc // int(match[1]))
        elif match := re.fullmatch(r"fsdp(\d+)(?:dp(\d+))?", text):
            end = cls("fsdp", 1, 1, int(match[2] or 1), int(match[1]))
        elif match := re.fullmatch(r"tp(\d+)(?:pp(\d+))?(?:dp(\d+))?", text):
            end = cls("megatron", int(match[1]), int(match[2] or 1), int(match[3] or 1))
        else:
            raise ValueError(f"{text!r} is not like tp2pp2, fsdp4 or vllm2")
        if end.tp * end.pp * end.dp * end.shards != nproc:
            raise ValueError(f"{text} is not a grid of {nproc} processes")
        return end

    def __str__(self) -> str:
        if self.engine == "vllm":
            return f"vLLM TP{self.tp}"
        if self.engine == "fsdp":
            return f"FSDP{self.shards}" + (f"xDP{self.dp}" if self.dp > 1 else "")
        sizes = (("TP", self.tp), ("PP", self.pp), ("DP", self.dp))
        return "x".join(
            f"{name}{size}" for name, size in sizes if size > 1 or name == "TP"
        )


def ends(pair: str, nproc: int) -> tuple[End, End]:
    """Return the two ends of a pair such as `tp2pp2-vllm2`.

    Raises:
        ValueError: the name is wrong; the message says in which part.
    """
    source, _, dest = pair.partition("-")
    both_ends = End.parse(source, nproc), End.parse(dest, nproc)
    if tuple(end.engine for end in both_ends) not in (
        ("megatron", "vllm"),
        ("megatron", "megatron"),
        ("fsdp", "vllm"),
    ):
        raise ValueError(
            f"{pair}: it goes from Megatron or FSDP2 to vLLM, or from Megatron to Megatron"
        )
    return both_ends


class Ours:
    """A Resharder, and the time and memory of its set-up."""

    def __init__(
        self,
        source_of: LayoutOf,
        source: Tensors,
        dest_of: LayoutOf,
        dest: Tensors,
        bucket_bytes: int,
        *,
        ipc: bool,
    ) -> None:
        start = time.perf_counter()
        self.plan = make_plan(
            source_of, dest_of, dist.get_world_size(), dist.get_rank()
        )
        options = TransportOptions(bucket_bytes=bucket_bytes, alias=True, ipc=ipc)
        self._resharder = Resharder(self.plan, source, dest, options=options)
        self.setup_seconds = time.perf_counter() - start

    def run(self) -> None:
        self.stats = self._resharder.run()

    @property
    def bytes_received(self) -> int:
        return self.stats.bytes_received

    @property
    def num_messages(self) -> int:
        return self.stats.num_messages


def least_elements(source: Layout, dest: Layout) -> int:
    """Return the elements that a rank needs and does not hold.

    Counts cell by cell between all borders of the rank's boxes, and uses no plan, so
    that it can judge plans.
    """
    total = 0
    for tensor, pieces in dest.by_tensor.items():
        needed, held = (
            [p.box for p in some] for some in (pieces, source.by_tensor.get(tensor, []))
        )
        borders = [
            sorted(
                {
                    border
                    for box in (*needed, *held)
                    for border in (box.start[axis], box.stop[axis])
                }
            )
            for axis in range(len(dest.global_shapes[tensor]))
        ]
        masks = np.zeros((2, *(len(axis) - 1 for axis in borders)), dtype=bool)
        for mask, boxes in zip(masks, (needed, held), strict=True):
            for box in boxes:
                mask[
                    tuple(
                        slice(b.index(i), b.index(j))
                        for b, i, j in zip(borders, *box, strict=True)
                    )
                ] = True
        sizes = np.ones((), dtype=np.int64)
        for axis in borders:
            sizes = np.multiply.outer(sizes, np.diff(axis))
        total += int(sizes[masks[0] & ~masks[1]].sum())
    return total


def share_in_place(plan: Plan) -> float:
    """Return the share of received elements that can be received straight into the destination's memory.

    These are boxes that are one run of memory; the others are columns of wider rows,
    unpacked from a bucket.
    """
    received = straight = 0
    for transfer in (t for transfers in plan.receives.values() for t in transfers):
        shape, box = (
            plan.dest_layout.local_shapes[transfer.dest_local],
            transfer.dest_box.shape,
        )
        first = next((axis for axis, size in enumerate(box) if size > 1), 0)
        received += transfer.box.numel
        straight += transfer.box.numel * (
            tuple(box[first + 1 :]) == tuple(shape[first + 1 :])
        )
    return straight / received if received else 1.0


def fill(layout: Layout, tensors: Tensors) -> None:
    """Give every element a value that follows from its name and place in the global array; finite in bfloat16."""
    for piece in layout.pieces:
        target = view(tensors[piece.local], piece.local_box)
        columns = torch.arange(
            piece.box.start[-1], piece.box.stop[-1]
        ) * 7919 + zlib.crc32(piece.tensor.encode())
        if target.dim() == 1:
            target.copy_((columns % 16001).to(torch.int16).view(torch.bfloat16))
            continue
        for row in range(0, target.shape[0], 1024):
            rows = (
                torch.arange(row, min(row + 1024, target.shape[0])) + piece.box.start[0]
            )
            values = (rows[:, None] * 1000003 + columns) % 16001
            target[row : row + len(rows)].copy_(
                values.to(torch.int16).view(torch.bfloat16)
            )


def peak_memory(run: Callable[[], None]) -> int:
    """Return the bytes by which this process's resident memory rose above its start while `run` ran."""
    gc.collect()
    # Memory that malloc keeps from before would hide what is asked for now.
    ctypes.CDLL(None).malloc_trim(0)
    # VmHWM starts again from what is resident.
    Path("/proc/self/clear_refs").write_text("5")
    start = _status("VmRSS")
    run()
    return _status("VmHWM") - start


def _status(field: str) -> int:
    [line] = [
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(field + ":")
    ]
    return int(line.split()[1]) * 1024


@contextlib.contextmanager
def object_collectives() -> Iterator[list[str]]:
    """Yield a list that receives the name of each of torch's pickling collectives that is called."""
    names = [name for name in dir(dist) if name.endswith(("_object", "_object_list"))]
    kept = {name: getattr(dist, name) for name in names}
    called: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return kept[name](*args, **kwargs)

        return function

    for name in names:
        setattr(dist, name, counted(name))
        setattr(dist.distributed_c10d, name, counted(name))
    try:
        yield called
    finally:
        for name in names:
            setattr(dist, name, kept[name])
            setattr(dist.distributed_c10d, name, kept[name])


def write_config(job: Job, folder: Path) -> None:
    """Make a folder that holds nothing but the model's config.json."""
    from transformers import Qwen2Config

    config = Qwen2Config(
        hidden_size=job.hidden,
        intermediate_size=job.ffn,
        num_hidden_layers=job.layers,
        num_attention_heads=job.heads,
        num_key_value_heads=job.kv_heads,
        vocab_size=job.vocab,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        architectures=["Qwen2ForCausalLM"],
    )
    config.save_pretrained(str(folder))


def megatron(
    job: Job, folder: Path, end: End, groups: ProcessGroupManager
) -> MegatronModel:
    """Build a real GPTModel on a grid. Its weights are left to be filled, since drawing
    them would take longer than all else.
    """
    grid = groups.grid(GridShape(tp=end.tp, pp=end.pp, dp=end.dp))
    leave = {
        name: _leave_as_it_is
        for name in ("init_method", "output_layer_init_method", "embedding_init_method")
    }
    return MegatronModel(
        ModelSpec.from_folder(folder),
        grid,
        ModelOptions(dtype=torch.bfloat16, seed=0),
        overrides=leave,
    )


def fsdp(folder: Path, end: End, groups: ProcessGroupManager) -> FSDPModel:
    """Build a real FSDP2 module with shards in bfloat16, whose weights are left to be filled."""
    cut = FsdpConfig(sharding_strategy="hybrid_shard", shard_size=end.shards)
    grid = groups.grid(GridShape(dp=end.shards * end.dp))
    return FSDPModel(
        folder,
        grid,
        groups,
        ModelOptions(dtype=torch.bfloat16, seed=0, trained=False, initialize=False),
        fsdp=cut,
    )


def _leave_as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@contextlib.contextmanager
def vllm_model(folder: Path, tp: int) -> Iterator[torch.nn.Module]:
    """Build vLLM's own model on this rank, in groups of `tp` neighbouring ranks, with no engine around it."""
    platform.adapt_vllm()
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = EngineArgs(
        str(folder),
        tensor_parallel_size=tp,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        distributed_executor_backend="external_launcher",
    ).create_engine_config()
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
        with unique_shared_memory():
            parallel_state.init_distributed_environment(backend="gloo")
            parallel_state.initialize_model_parallel(tp)
        try:
            yield initialize_model(config)
        finally:
            parallel_state.destroy_model_parallel()


def measure_pair(
    job: Job, pair: str, folder: Path, groups: ProcessGroupManager
) -> dict[str, Any]:
    """Return this rank's measurements of one pair."""
    source_end, dest_end = ends(pair, job.nproc)
    folder = folder / pair
    on_first_rank(
        lambda: write_config(job.sized_for([source_end.tp, dest_end.tp]), folder)
    )
    source: MegatronModel | FSDPModel
    if source_end.engine == "fsdp":
        source = fsdp(folder, source_end, groups)
    else:
        source = megatron(job, folder, source_end, groups)
    fill(source.layout_of(source.grid.rank), source.parameters)
    with contextlib.ExitStack() as stack:
        if dest_end.engine == "vllm":
            engine = stack.enter_context(vllm_model(folder, dest_end.tp))
            dest_of = vllm_layouts(source.weights, source.spec, dest_end.tp)
            if isinstance(source, MegatronModel):
                peer: Any = Bridge(source, engine, job.bridge_bucket_mb * MB)
            else:
                peer = FullTensors(source, engine)
            return measure_ways(
                job, source, dest_of, dict(engine.named_parameters()), "bridge", peer
            )
        assert isinstance(source, MegatronModel)
        dest = megatron(job, folder, dest_end, groups)
        return measure_ways(
            job,
            source,
            dest.layout_of,
            dest.parameters,
            "megatron.core",
            CoreResharding(source, dest),
        )


def measure_ways(
    job: Job,
    source: TrainingModel,
    dest_of: LayoutOf,
    dest: Tensors,
    peer_name: str,
    peer: Any,
) -> dict[str, Any]:
    """Check every way once while its memory is measured; then time all in turn."""
    rank = dist.get_rank()
    measured: dict[str, Any] = {"ways": {}}
    check = ReshardCheck(source.layout_of, dest_of, source.parameters, dest)

    def first_run(name: str, reshard: Any) -> None:
        dist.barrier()
        with object_collectives() as called:
            start = time.perf_counter()
            peak = peak_memory(reshard.run)
            seconds = time.perf_counter() - start
        measured["ways"][name] = {
            "peak": peak,
            "first_seconds": seconds,
            "received": reshard.bytes_received,
            "messages": reshard.num_messages,
            "first_objects": len(called),
            "seconds": [],
        }
        if not isinstance(reshard, PlainExchange):
            checked = check.compare()
            measured["check"] = {
                "bytes": checked.bytes_read,
                "seconds": checked.seconds,
            }

    def zero() -> None:
        """Clear the destination, so that no way passes with an earlier way's result; not if it is the source itself."""
        sources = {
            tensor.untyped_storage().data_ptr() for tensor in source.parameters.values()
        }
        with torch.no_grad():
            for tensor in dest.values():
                if tensor.untyped_storage().data_ptr() not in sources:
                    tensor.zero_()

    zero()
    first_run(peer_name, peer)
    by_name: dict[str, Any] = {peer_name: peer}
    # After the peer, as storages are joined.
    for name, ipc in (("ours, network", False), ("ours", True)):
        zero()
        by_name[name] = Ours(
            source.layout_of,
            source.parameters,
            dest_of,
            dest,
            job.bucket_mb * MB,
            ipc=ipc,
        )
        first_run(name, by_name[name])
    ours = by_name["ours"]
    by_name["plain"] = PlainExchange(
        ours.plan, torch.bfloat16.itemsize, job.bucket_mb * MB
    )
    first_run("plain", by_name["plain"])
    for _ in range(job.repeats):
        for name, timed_reshard in by_name.items():
            dist.barrier()
            with object_collectives() as called:
                start = time.perf_counter()
                timed_reshard.run()
                measured["ways"][name]["seconds"].append(time.perf_counter() - start)
            measured["ways"][name]["objects"] = len(called)
    check.compare()
    measured |= {
        "parameters": sum(math.prod(weight.shape) for weight in source.weights),
        "least": least_elements(source.layout_of(rank), dest_of(rank))
        * torch.bfloat16.itemsize,
        "local": ours.stats.bytes_local,
        "aliased": ours.stats.bytes_aliased,
        "setup_seconds": ours.setup_seconds,
        "in_place": share_in_place(ours.plan),
    }
    dist.barrier()
    if rank == 0:  # one process alone, so that the rate is that of a core
        name, parameter = max(dest.items(), key=lambda item: item[1].numel())
        start = time.perf_counter()
        box_fingerprint(parameter.detach(), whole(tuple(parameter.shape)))
        measured["fingerprint_rate"] = parameter.nbytes / (time.perf_counter() - start)
    dist.barrier()
    return measured


def run_rank(job: Job, pair: str, folder: Path) -> None:
    """Run one rank of a pair's benchmark; rank 0 writes the results of all."""
    console = redirect_output(folder / "logs", int(os.environ["RANK"]))
    platform.start()
    dist.init_process_group(platform.backend, timeout=datetime.timedelta(minutes=10))
    start = time.perf_counter()
    ranks = gather_json(measure_pair(job, pair, folder, ProcessGroupManager()))
    if dist.get_rank() == 0:
        (folder / f"{pair}.json").write_text(json.dumps(ranks), encoding="utf-8")
        console.print(f"{pair}: measured in {time.perf_counter() - start:.0f} s")
    dist.barrier()
    dist.destroy_process_group()
