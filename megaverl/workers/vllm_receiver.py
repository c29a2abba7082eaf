"""The worker's side of weights that go to a vLLM server shard to shard, or as changes through a shared folder.

`megaverl serve rollout` starts servers with `--worker-extension-cls
megaverl.workers.vllm_receiver.ShardReceiver`, so each worker has the method that the
run calls through `/collective_rpc`:

    run     POST /collective_rpc {"method": "megaverl_receive", ...}  ->  every worker of the server
    worker  first call of a link: trace vLLM's loader, join the actor's ranks (`weights/server_link.py`)
            every call: receive one version in place, and compute again what vLLM derives from weights
    worker  answer: received bytes, or an error

With `rollout.servers.transfer: folder` and `reshard.delta`, a worker writes the changes
of a version (`weights/change_files.py`) into the weights that it has read before.

A worker never raises: vLLM's executor stops reading at the first error, and would take
the answers of the other workers for those of the next call (0.32:
v1/executor/multiproc_executor.py).
"""

from __future__ import annotations

import json
import logging
import os
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megaverl.errors import ReshardError, RolloutError, TrainingStopped
from megaverl.platform import platform
from megaverl.rollout.vllm_layouts import BESIDE, LoaderLayouts
from megaverl.rollout.vllm_requests import vllm_cpu
from megaverl.rollout.vllm_weights import (
    loaded_tensors,
    quantised_weights,
    remake_derived,
)
from megaverl.sharding.layout import Layout
from megaverl.sharding.weight import listed
from megaverl.weights.change_files import (
    ChangesDescription,
    apply_changes,
    box_fingerprints,
    stored_shapes,
)
from megaverl.weights.reshard import ReshardStats
from megaverl.weights.server_link import (
    Link,
    LinkAddress,
    LinkError,
    Shapes,
    open_as_receiver,
    report_failure,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

# Errors that say that another process of the link failed.
OF_OTHERS = (LinkError, ReshardError, TrainingStopped)


class ShardReceiver:
    """Extension of vLLM's worker. Its names must not be those of vLLM's own methods."""

    def megaverl_receive(self, task: str) -> dict[str, Any]:
        """Receive one version of the weights, in place.

        Args:
            task: JSON of the link's address as `link`, and the number of this server's first worker as `first_rank`.

        Returns:
            `bytes` received, and `changed_fraction`, `busiest_sent` and `busiest_whole`
            of `ReshardStats`; or `error`, and whether the error is this worker's `own`.
        """
        # vLLM mixes this class into its worker, of which the type checker knows
        # nothing.
        worker: Any = self
        description = json.loads(task)
        address = LinkAddress(**description["link"])
        try:
            stats = _receive(worker, address, int(description["first_rank"]))
            return {
                "bytes": stats.bytes_received,
                "changed_fraction": stats.changed_fraction,
                "busiest_sent": stats.busiest_sent,
                "busiest_whole": stats.busiest_whole,
            }
        except Exception as error:  # an answer, see the module's docstring
            logger.warning("megaverl: %s", traceback.format_exc())
            text = str(error) or type(error).__name__
            is_own = not isinstance(error, OF_OTHERS)
            # A link that failed is not used again. Its other members learn the reason.
            if (end := worker.__dict__.pop("_megaverl_end", None)) is not None:
                end.link.fail(text)
            # Without a link, report the failure through its store, or the members that
            # wait there would wait until the time limit.
            elif is_own:
                with suppress(TimeoutError, TrainingStopped, dist.DistError):
                    report_failure(address.reach(), text)
            return {"error": text, "own": is_own}

    def megaverl_prepare_changes(self, folder: str) -> dict[str, Any]:
        """Find out where this worker holds the weights of a Hugging Face folder, so that changes can be applied.

        Returns:
            `problem`: why changes cannot be applied, or None.
        """
        worker: Any = self
        try:
            layouts = _layouts_of(worker)
            layouts.lay_out(stored_shapes(Path(folder)))
            return {"problem": layouts.problem_with_changes}
        except Exception as error:  # an answer, see the module's docstring
            logger.warning("megaverl: %s", traceback.format_exc())
            return {"problem": str(error) or type(error).__name__}

    def megaverl_apply_changes(self, task: str) -> dict[str, Any]:
        """Apply the changes of some versions to this worker's weights.

        Args:
            task: JSON of the versions' `folders`, in order, and whether to `check`.

        Returns:
            `bytes` that were read, and `fingerprints` of this worker's boxes (empty unless `check`); or `error`.
        """
        worker: Any = self
        told = json.loads(task)
        try:
            folders = list(map(Path, told["folders"]))
            return _apply(_layouts_of(worker), folders, check=told["check"])
        except Exception as error:  # an answer, see the module's docstring
            logger.warning("megaverl: %s", traceback.format_exc())
            return {"error": str(error) or type(error).__name__}


def _layouts_of(worker: Any) -> WorkerLayouts:
    """Return the layouts of a worker's model, made once: tracing the loader takes seconds and outlives links."""
    layouts: WorkerLayouts | None = worker.__dict__.get("_megaverl_layouts")
    if layouts is None:
        layouts = worker._megaverl_layouts = WorkerLayouts(worker)
    return layouts


def _apply(
    layouts: WorkerLayouts, folders: Sequence[Path], *, check: bool
) -> dict[str, Any]:
    """Apply the changes of some versions, in order."""
    nbytes = 0
    description = ChangesDescription.read(folders[-1])
    layout, tensors = layouts.lay_out(description.shapes)
    for folder in folders:
        nbytes += apply_changes(folder, layout, tensors)
    layouts.written()
    # The answer must not leave before the device has written everything.
    if platform.is_cuda:
        torch.cuda.synchronize()
    fingerprints = box_fingerprints(layout, tensors, description.dtype) if check else {}
    return {"bytes": nbytes, "fingerprints": fingerprints}


def _receive(worker: Any, address: LinkAddress, first_rank: int) -> ReshardStats:
    """Receive one version, through a new link if this worker has another or none."""
    end: ReceivingEnd | None = worker.__dict__.get("_megaverl_end")
    # Another address means other members, so a new group is needed.
    if end is None or end.link.address != address:
        if end is not None:
            end.link.close()
            del worker._megaverl_end
        layouts = _layouts_of(worker)
        end = worker._megaverl_end = ReceivingEnd(layouts, address, first_rank)
    return end.receive()


class WorkerLayouts:
    """Layout and tensors of this worker's model.

    Raises:
        RolloutError: weights of this model cannot be written in place.
    """

    def __init__(self, worker: Any) -> None:
        self.config: VllmConfig = worker.vllm_config
        self.model: torch.nn.Module = worker.model_runner.get_model()
        self.dtype = self.config.model_config.dtype
        if quantised_weights(self.model):
            raise RolloutError(
                "its weights are quantised, which only transfer: folder can update. Use that."
            )
        # The platform's device is that of LOCAL_RANK, which vLLM's workers do not have.
        if platform.is_cuda:
            os.environ["LOCAL_RANK"] = str(worker.device.index or 0)
        self.loader = LoaderLayouts(self.model, self.config, self.dtype, empty=False)
        self._shapes: Shapes | None = None

    @property
    def tp_rank(self) -> int:
        """Place of this worker in its server."""
        from vllm.distributed import get_tp_group

        return int(get_tp_group().rank_in_group)

    def lay_out(self, shapes: Shapes) -> tuple[Layout, dict[str, torch.Tensor]]:
        """Return the layout of weights with these shapes, and the tensors that they fill."""
        # The loader is traced again only if the sender's weights have other shapes.
        if self._shapes != shapes:
            self.loader.take(dict(shapes), self.tp_rank)
            self._shapes = shapes
        assert self.loader.mine is not None
        held = loaded_tensors(self.model)
        return self.loader.mine, {
            name: held[name] for name in self.loader.local_names()
        } | self.loader.beside

    @property
    def problem_with_changes(self) -> str | None:
        """Return why changes cannot be applied to weights that vLLM has read from a folder, or None."""
        if self.loader.beside:
            return (
                "vLLM computes parameters from "
                f"{', '.join(name.removeprefix(BESIDE) for name in listed(self.loader.beside))}, "
                "which it does not keep"
            )
        return None

    def written(self) -> None:
        """Compute again what vLLM derives from the weights that were written."""
        # Weights that are computed on loading, and values that vLLM derives from
        # weights, in this order.
        self.loader.load_computed()
        # Captured CUDA graphs hold the addresses of derived tensors.
        may_move = not platform.is_cuda or bool(self.config.model_config.enforce_eager)
        remake_derived(self.model, self.dtype, may_move=may_move)
        if not platform.is_cuda:
            vllm_cpu().repack_weights(self.model)


class ReceivingEnd:
    """This worker's end of one link.

    Args:
        first_rank: number in the link of this server's first worker.
    """

    link: Link

    def __init__(
        self, layouts: WorkerLayouts, address: LinkAddress, first_rank: int
    ) -> None:
        self._layouts = layouts
        rank = first_rank + layouts.tp_rank
        with torch.no_grad():
            self.link = open_as_receiver(
                address, rank, layouts.lay_out, f"worker {layouts.tp_rank}"
            )

    def receive(self) -> ReshardStats:
        """Receive one version."""
        with torch.no_grad():
            stats = self.link.run()
            self._layouts.written()
        # The answer must not leave before the device has written everything.
        if platform.is_cuda:
            torch.cuda.synchronize()
        return stats
