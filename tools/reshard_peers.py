"""Other projects' ways to move a trainer's weights, for `bench_reshard.py` to compare with ours.

Every rank calls `run()` of a way; `bytes_received` and `num_messages` are those of this rank's last run.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

# A checkout needs no installation of megaverl.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megaverl.distributed.collectives import gather_json
from megaverl.sharding.plan import Plan, Transfer
from megaverl.workers.fsdp_model import FSDPModel
from megaverl.workers.megatron_model import MegatronModel


@dataclass(frozen=True)
class Parameter:
    """One parameter of the whole model in the bridges' metadata, which are gathered once before the first sync."""

    name: str
    local: str
    stage: int
    shape: tuple[int, ...]
    partition_dim: int | None

    def numel(self, tp: int) -> int:
        """Return the number of elements of the full parameter."""
        return torch.Size(self.shape).numel() * (
            1 if self.partition_dim is None else tp
        )


class Bridge:
    """Rebuilds full Hugging Face tensors and loads them, as verl and slime do for an engine on the same ranks.

    For a bucket of parameters at a time, as slime's `update_weight` does: broadcast
    each from its pipeline stage to all others (asynchronously, then wait for all),
    all-gather it over tensor-parallel ranks (likewise), join and rename it, and hand
    the bucket to `load_weights` of vLLM's model, which takes each rank's slices out.
    Metadata is gathered once, as in slime; verl sends three pickled objects per
    parameter and sync besides.

    Args:
        engine_model: vLLM's model on this rank.
        bucket_bytes: bytes of full tensors in a bucket; 512 MiB in both projects.
    """

    def __init__(
        self, model: MegatronModel, engine_model: Any, bucket_bytes: int
    ) -> None:
        assert model.grid.shape.vpp is None
        self._model, self._engine_model = model, engine_model
        self._tp, self._pp = model.grid.shape.tp, model.grid.shape.pp
        self._pp_ranks = dist.get_process_group_ranks(model.grid.pp_group)
        self._dtype = next(iter(model.parameters.values())).dtype
        self.bytes_received = self.num_messages = 0
        self._buckets: list[list[Parameter]] = [[]]
        filled = 0
        for parameter in self._metadata():
            size = parameter.numel(self._tp) * self._dtype.itemsize
            if self._buckets[-1] and filled + size > bucket_bytes:
                self._buckets.append([])
                filled = 0
            self._buckets[-1].append(parameter)
            filled += size

    @property
    def num_buckets(self) -> int:
        return len(self._buckets)

    def _metadata(self) -> Iterator[Parameter]:
        local_parameters = []
        first_layer = (
            self._model.spec.num_layers // self._pp * self._model.grid.coords.pp
        )
        for local, parameter in self._model.parameters.items():
            if local == "output_layer.weight" and self._model.spec.tie_embeddings:
                continue  # the last stage's copy of the embedding
            name = re.sub(
                r"layers\.(\d+)\.",
                lambda match: f"layers.{first_layer + int(match[1])}.",
                local,
            )
            parallel = (
                getattr(parameter, "tensor_model_parallel", False) and self._tp > 1
            )
            partition_dim = (
                getattr(parameter, "partition_dim", None) if parallel else None
            )
            local_parameters.append([name, local, list(parameter.shape), partition_dim])
        for stage, stage_parameters in enumerate(
            gather_json(local_parameters, self._model.grid.pp_group)
        ):
            for name, local, shape, partition_dim in stage_parameters:
                yield Parameter(name, local, stage, tuple(shape), partition_dim)

    def run(self) -> None:
        self.bytes_received = self.num_messages = 0
        with torch.no_grad():
            for bucket in self._buckets:
                shards = self._broadcast(bucket)
                full = self._gather(bucket, shards)
                del shards
                names = (
                    pair
                    for p, tensor in zip(bucket, full, strict=True)
                    for pair in self._convert(p.name, tensor)
                )
                self._engine_model.load_weights(names)

    def _broadcast(self, bucket: Sequence[Parameter]) -> list[torch.Tensor]:
        """Return this tensor-parallel rank's shard of each parameter, broadcast from its pipeline stage."""
        shards, works = [], []
        for parameter in bucket:
            if parameter.stage == self._model.grid.coords.pp:
                shard = self._model.parameters[parameter.local].data
            else:
                shard = torch.empty(parameter.shape, dtype=self._dtype)
                self.bytes_received += shard.nbytes
            shards.append(shard)
            if self._pp > 1:
                source, group = (
                    self._pp_ranks[parameter.stage],
                    self._model.grid.pp_group,
                )
                works.append(dist.broadcast(shard, source, group=group, async_op=True))
                self.num_messages += 1
        for work in works:
            work.wait()
        return shards

    def _gather(
        self, bucket: Sequence[Parameter], shards: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the full parameters, in Megatron's order of rows."""
        parts: list[list[torch.Tensor]] = []
        works = []
        for parameter, shard in zip(bucket, shards, strict=True):
            if parameter.partition_dim is None:
                parts.append([shard])
                continue
            parts.append([torch.empty_like(shard) for _ in range(self._tp)])
            works.append(
                dist.all_gather(
                    parts[-1], shard, group=self._model.grid.tp_group, async_op=True
                )
            )
            self.num_messages += 1
            self.bytes_received += (self._tp - 1) * shard.nbytes
        for work in works:
            work.wait()
        full = []
        for parameter, pieces in zip(bucket, parts, strict=True):
            # [gate; up] of every rank.
            if "linear_fc1" in parameter.name and len(pieces) > 1:
                halves = [part.chunk(2, dim=0) for part in pieces]
                pieces = [half[0] for half in halves] + [half[1] for half in halves]
            full.append(
                pieces[0]
                if len(pieces) == 1
                else torch.cat(pieces, dim=parameter.partition_dim or 0)
            )
        return full

    def _convert(
        self, name: str, tensor: torch.Tensor
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a Megatron parameter as Qwen2's Hugging Face weights."""
        spec = self._model.spec
        if name == "embedding.word_embeddings.weight":
            yield "model.embed_tokens.weight", tensor[: spec.vocab_size]
        elif name == "output_layer.weight":
            yield "lm_head.weight", tensor[: spec.vocab_size]
        elif name == "decoder.final_layernorm.weight":
            yield "model.norm.weight", tensor
        else:
            number, rest = name.removeprefix("decoder.layers.").split(".", 1)
            prefix = f"model.layers.{number}."
            kind = rest.rsplit(".", 1)[1]
            if ".linear_qkv." in rest:
                grouped = tensor.view(
                    spec.num_kv_heads, -1, spec.head_dim, *tensor.shape[1:]
                )
                heads = [spec.num_heads // spec.num_kv_heads, 1, 1]
                for part, rows in zip("qkv", grouped.split(heads, dim=1), strict=True):
                    yield (
                        f"{prefix}self_attn.{part}_proj.{kind}",
                        rows.reshape(-1, *tensor.shape[1:]),
                    )
            elif ".linear_fc1." in rest:
                for part, rows in zip(
                    ("gate", "up"), tensor.chunk(2, dim=0), strict=True
                ):
                    yield f"{prefix}mlp.{part}_proj.weight", rows
            else:
                yield prefix + HF_NAMES[rest], tensor


HF_NAMES = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}


class FullTensors:
    """Loads `full_tensor()` of each parameter into the engine, as verl's and slime's FSDP trainers do.

    Parameters go one after the other into `load_weights` of vLLM's model, which takes
    each rank's slices out.
    """

    def __init__(self, model: FSDPModel, engine_model: Any) -> None:
        self._parameters, self._engine_model = (
            dict(model.module.model.named_parameters()),
            engine_model,
        )
        self.bytes_received = self.num_messages = 0

    def run(self) -> None:
        self.bytes_received = self.num_messages = 0
        with torch.no_grad():
            self._engine_model.load_weights(self._full())

    def _full(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._parameters.items():
            assert isinstance(parameter, DTensor)
            whole = parameter.full_tensor()
            self.num_messages += 1
            self.bytes_received += whole.nbytes - parameter.to_local().nbytes
            yield name, whole


class CoreResharding:
    """`megatron.core.resharding`, Megatron to Megatron, with its own plan, cached after the first run."""

    def __init__(self, source: MegatronModel, dest: MegatronModel) -> None:
        self._source, self._dest = source.chunks[0], dest.chunks[0]

    def run(self) -> None:
        from megatron.core.resharding.refit import swap_model_weights

        swap_model_weights(self._source, self._dest, "gloo")

    @property
    def _plan(self) -> Any:
        from megatron.core.resharding import refit

        kept = vars(refit).get("_plan_cache")  # since 0.19
        return self._dest._cached_reshard_plan if kept is None else [*kept.values()][-1]

    @property
    def bytes_received(self) -> int:
        parameters = dict(self._dest.named_parameters())
        return sum(
            parameters[op.param_name].data[op.my_slice].nbytes
            for op in self._plan.recv_ops
            if op.peer_rank != dist.get_rank()
        )

    @property
    def num_messages(self) -> int:
        ops = [*self._plan.send_ops, *self._plan.recv_ops]
        return sum(op.peer_rank != dist.get_rank() for op in ops)


class PlainExchange:
    """Plain isend and irecv of the same bytes between the same peers, in messages of a bucket's size.

    Every pair's next message is posted at once, all are waited for, and so on. Each
    byte leaves from and lands in memory of its own, as weights do; nothing is packed,
    sliced or put in place.
    """

    def __init__(self, plan: Plan, itemsize: int, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._out = {
            peer: torch.ones(_nbytes(transfers, itemsize), dtype=torch.uint8)
            for peer, transfers in plan.sends.items()
        }
        self._in = {
            peer: torch.zeros(_nbytes(transfers, itemsize), dtype=torch.uint8)
            for peer, transfers in plan.receives.items()
        }
        self.bytes_received = sum(data.nbytes for data in self._in.values())
        self.num_messages = 0

    def run(self) -> None:
        self.num_messages = 0
        most = max(
            (data.nbytes for data in (*self._out.values(), *self._in.values())),
            default=0,
        )
        for start in range(0, most, self._bucket_bytes):
            part = slice(start, start + self._bucket_bytes)
            ops = [
                dist.P2POp(operation, data[part], peer)
                for operation, by_peer in (
                    (dist.isend, self._out),
                    (dist.irecv, self._in),
                )
                for peer, data in by_peer.items()
                if start < data.nbytes
            ]
            self.num_messages += len(ops)
            for work in dist.batch_isend_irecv(ops) if ops else ():
                work.wait()


def _nbytes(transfers: Sequence[Transfer], itemsize: int) -> int:
    return sum(transfer.box.numel for transfer in transfers) * itemsize
