"""What ranks on software devices do in tests/softcuda/test_device.py, test_nccl.py and test_streams.py."""

from __future__ import annotations

import io
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from tests.softcuda import install

ROWS = 1000
SHORT = timedelta(seconds=3)  # until a collective that cannot end raises


# ---- the device itself -----------------------------------------------------------------------------------------------


def error_of(function: Callable[[], object]) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def refusals() -> dict[str, str]:
    """What CUDA refuses."""
    here, there = torch.ones(3, device="cuda"), torch.ones(3)
    square = torch.ones(2, 2)
    return {
        "numpy": error_of(here.numpy),
        "add": error_of(lambda: here + there),
        "add_": error_of(lambda: there.add_(here)),
        "mm": error_of(lambda: square @ square.cuda()),
        "index": error_of(lambda: there[here.long()]),
        "pin": error_of(lambda: here.pin_memory()),
        "device": error_of(lambda: torch.ones(1, device="cuda:7")),
        "memory": error_of(lambda: torch.empty(1 << 40, device="cuda")),
    }


def gradients() -> bool:
    """Whether a small network has the CPU's values and gradients, to the bit."""
    generator = torch.Generator().manual_seed(0)
    rows, weight = (
        torch.randn(5, 8, generator=generator),
        torch.randn(8, 8, generator=generator),
    )
    found = []
    for device in ("cpu", "cuda"):
        x, w = rows.to(device), weight.clone().to(device).requires_grad_()
        loss = F.cross_entropy(F.gelu(x @ w), torch.arange(5, device=device))
        loss.backward()
        assert w.grad is not None and w.grad.device == w.device
        found.append((loss.detach().cpu(), w.grad.cpu()))
    return all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


def optimizers() -> dict[str, bool]:
    found = {}
    for name, options in (
        ("fused", {"fused": True}),
        ("foreach", {"foreach": True}),
        ("plain", {}),
    ):
        models = []
        for device in ("cpu", "cuda"):
            torch.manual_seed(0)
            model = torch.nn.Linear(8, 8).to(device)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.ones(2, 8, device=device)).square().sum().backward()
                optimizer.step()
            models.append(model.weight.detach().cpu())
        found[name] = bool(torch.equal(*models))
    return found


def copies(threshold: int) -> bool:
    """Whether boxes are copied right where those of `threshold` bytes and more are copied one by one."""
    from unittest.mock import patch

    from megaverl.weights.transports import copy_boxes, transport

    wide = torch.arange(4 * 64.0, device="cuda").reshape(4, 64)
    pairs = [
        # Contiguous, of one dtype: alone from the threshold on.
        (torch.zeros(4, 64, device="cuda"), wide),
        # Another shape of as many elements.
        (torch.zeros(2, 2, device="cuda"), wide[:1, :4].contiguous()),
        (torch.zeros(4, 32, device="cuda"), wide[:, :32]),  # strided
        (torch.zeros(4, 64, dtype=torch.bfloat16, device="cuda"), wide),  # converted
    ]
    with patch.object(transport, "LARGE_COPY", threshold):
        copy_boxes([target for target, _ in pairs], [origin for _, origin in pairs])
    return all(
        torch.equal(target, origin.reshape(target.shape).to(target.dtype))
        for target, origin in pairs
    )


def memory() -> dict[str, Any]:
    """Views, storages, page-locked memory and counts."""
    tensor = torch.zeros(4, 4, device="cuda")
    tensor.view(16)[4:8].fill_(1)
    storage = tensor.untyped_storage()
    before = torch.cuda.memory_allocated()
    storage.resize_(0)
    emptied = before - torch.cuda.memory_allocated()
    storage.resize_(64)
    tensor.fill_(2)
    locked = (torch.empty(2, pin_memory=True), torch.ones(2).pin_memory())
    other = torch.empty(0, device="cuda").set_(storage, 8, (2, 2), (2, 1))
    file = io.BytesIO()
    torch.save({"tensor": tensor}, file)
    file.seek(0)
    loaded = torch.load(file)["tensor"]
    free, total = torch.cuda.mem_get_info()
    return {
        "emptied": emptied,
        "shared": other.tolist(),
        "loaded": [str(loaded.device), loaded.sum().item()],
        "pinned": [tensor.is_pinned() for tensor in (*locked, other)],
        "counted": total - free == torch.cuda.memory_allocated() > 0,
    }


def draws() -> dict[str, bool]:
    torch.cuda.manual_seed(3)
    first = torch.randn(3, device="cuda")
    state = torch.cuda.get_rng_state()
    second = torch.randn(3, device="cuda")
    torch.cuda.set_rng_state(state)
    again = torch.randn(3, device="cuda")
    torch.manual_seed(3)
    on_cpu = torch.randn(3)
    return {
        "repeats": torch.equal(second, again),
        "moves_on": not torch.equal(first, second),
        "is_the_cpus": torch.equal(first.cpu(), on_cpu),
    }


# ---- nccl ------------------------------------------------------------------------------------------------------------


def join(timeout: timedelta = timedelta(seconds=60)) -> tuple[int, int]:
    from megaverl.platform import platform

    platform.start()
    assert platform.backend == "nccl"
    dist.init_process_group(platform.backend, timeout=timeout)
    return dist.get_rank(), dist.get_world_size()


def relayed_reshard(**case: Any) -> dict[str, Any]:
    """A reshard with fan-out and without (`tests.weights.fan_out_ranks`), on the device."""
    from tests.weights.fan_out_ranks import relayed

    join()
    return relayed(**case)


def quantised_landing(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Reshards into engines in 8 bits (`tests.weights.quantised_ranks`), on the device."""
    from tests.weights.quantised_ranks import land

    join()
    return land(cases)


def collectives() -> dict[str, Any]:
    """One of each kind, as lists."""
    rank, size = join()
    mine = torch.full((2,), float(rank), device="cuda")
    found: dict[str, torch.Tensor] = {}
    found["all_reduce"] = mine + 1
    dist.all_reduce(found["all_reduce"])
    found["all_gather"] = torch.empty(2 * size, device="cuda")
    dist.all_gather_into_tensor(found["all_gather"], mine)
    found["reduce_scatter_mean"] = torch.empty(2, device="cuda")
    scattered = torch.arange(2.0 * size, device="cuda")
    dist.reduce_scatter_tensor(
        found["reduce_scatter_mean"], scattered, op=dist.ReduceOp.AVG
    )
    found["broadcast"] = mine.clone()
    dist.broadcast(found["broadcast"], 1)
    found["all_to_all"] = torch.empty(size, device="cuda")
    dist.all_to_all_single(
        found["all_to_all"], torch.arange(float(size), device="cuda") + 10 * rank
    )
    found["reduce"] = mine.clone()
    dist.reduce(found["reduce"], 0)
    uneven = [torch.empty(other + 1, device="cuda") for other in range(size)]
    dist.all_gather(uneven, torch.full((rank + 1,), float(rank), device="cuda"))
    found["uneven"] = torch.cat(uneven)
    received = torch.empty(2, device="cuda")
    operations = [
        dist.P2POp(dist.isend, mine, 1 - rank),
        dist.P2POp(dist.irecv, received, 1 - rank),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    found["batch"] = received
    dist.barrier()
    return {name: tensor.tolist() for name, tensor in found.items()}


def messages() -> dict[str, Any]:
    """Messages have no names; a sender's host goes on before its receiver has come."""
    rank, _ = join()
    hosts = dist.new_group(backend="gloo")
    if rank == 0:
        for value in (1.0, 2.0):
            dist.send(torch.full((2,), value, device="cuda"), 1, tag=int(value))
        dist.all_reduce(torch.ones(1), group=hosts)
        torch.cuda.synchronize()  # waits until they are taken
        return {}
    # Rank 0 comes here while its messages are on their way.
    dist.all_reduce(torch.ones(1), group=hosts)
    received = [torch.empty(2, device="cuda") for _ in range(2)]
    for tensor, tag in zip(received, (2, 1), strict=True):
        dist.recv(tensor, 0, tag=tag)
    return {"received": [tensor.tolist() for tensor in received]}


def refused_by_nccl() -> dict[str, str]:
    join()
    apart = torch.ones(4, 4, device="cuda")[:, ::2]
    return {
        "host": error_of(lambda: dist.all_reduce(torch.ones(2))),
        "apart": error_of(lambda: dist.all_reduce(apart)),
    }


def never_ends(kind: str) -> str:
    """What would wait for ever on GPUs; here for `SHORT`."""
    rank, _ = join(SHORT)
    tensor = torch.ones(2, device="cuda")

    def crossed() -> None:
        groups = [dist.new_group([0, 1], timeout=SHORT) for _ in range(2)]
        for group in groups if rank == 0 else groups[::-1]:
            dist.all_reduce(tensor, group=group, async_op=True)
        torch.cuda.synchronize()
        dist.barrier()

    def facing() -> None:
        dist.send(tensor, 1 - rank)
        dist.recv(tensor, 1 - rank)

    def alone() -> None:  # a batch of some ranks alone, as a group's first operation
        if rank == 0:
            dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, 1)])[0].wait()
        else:
            dist.recv(tensor, 0)

    return error_of({"crossed": crossed, "facing": facing, "alone": alone}[kind])


# ---- streams ---------------------------------------------------------------------------------------------------------


def reported(case: str) -> list[str]:
    """Do something with streams; what the device has reported."""
    CASES[case]()
    return install.reports


def used_on_side(
    wait_before: bool = True, wait_after: bool = True, writes: bool = False
) -> None:
    side, x = torch.cuda.Stream(), torch.ones(ROWS, device="cuda")
    x.mul_(2)
    if wait_before:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x.mul_(3) if writes else x + 1
    if wait_after:
        torch.cuda.current_stream().wait_stream(side)
    y + 1
    torch.cuda.synchronize()


def waited_by_event() -> None:
    side, x, event = (
        torch.cuda.Stream(),
        torch.ones(ROWS, device="cuda"),
        torch.cuda.Event(),
    )
    event.record()
    side.wait_event(event)
    with torch.cuda.stream(side):
        x.mul_(2)
        event.record()
    event.synchronize()
    x + 1


def asked_once() -> None:
    side, x, event = (
        torch.cuda.Stream(),
        torch.ones(ROWS, device="cuda"),
        torch.cuda.Event(),
    )
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.mul_(2)
        event.record()
    event.query()  # not over, perhaps
    x + 1


def released_early(record: bool = False, wait: bool = False) -> None:
    side, x = torch.cuda.Stream(), torch.ones(ROWS, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x + 1
    if record:
        x.record_stream(side)
    if wait:
        torch.cuda.current_stream().wait_stream(side)
    del x
    torch.ones(ROWS, device="cuda")  # the same memory, on a GPU


def host_writes(early: bool) -> None:
    locked, x = torch.zeros(ROWS, pin_memory=True), torch.empty(ROWS, device="cuda")
    x.copy_(locked, non_blocking=True)
    if not early:
        torch.cuda.synchronize()
    locked.fill_(3)
    torch.cuda.synchronize()


def backward_of_side() -> None:
    """Autograd runs an operator's backward on its forward's stream and orders the two itself."""
    side, w = torch.cuda.Stream(), torch.ones(4, 4, device="cuda", requires_grad=True)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loss = (w * 2).sum()
    torch.cuda.current_stream().wait_stream(side)
    loss.backward()
    assert w.grad is not None
    w.grad.sum().item()


CASES: dict[str, Callable[[], object]] = {
    "read on another stream, ordered": used_on_side,
    "read on another stream, not waited for": lambda: used_on_side(wait_before=False),
    "read back, not waited for": lambda: used_on_side(wait_after=False),
    "written on another stream, ordered": lambda: used_on_side(writes=True),
    "written on another stream, not waited for": lambda: used_on_side(
        writes=True, wait_after=False
    ),
    "ordered by events": waited_by_event,
    "an event that was asked once": asked_once,
    "released early": released_early,
    "released early, recorded": lambda: released_early(record=True),
    "released early, waited for": lambda: released_early(wait=True),
    "the host writes too early": lambda: host_writes(True),
    "the host writes in time": lambda: host_writes(False),
    "a backward pass": backward_of_side,
}


def host_reads() -> list[list[float]]:
    """What the host reads of a copy from the device, before and after it has waited."""
    locked = torch.zeros(3, pin_memory=True)
    locked.copy_(torch.ones(3, device="cuda"), non_blocking=True)
    before = [str(value) for value in locked.tolist()]
    torch.cuda.synchronize()
    return [before, locked.tolist()]  # type: ignore[list-item]


def poisoned() -> list[str]:
    fresh = torch.empty(2, device="cuda")
    return [str(value) for value in fresh.tolist()]


def group_reads_unwaited(wait: bool) -> list[str]:
    """A collective's result is read with or without the wait."""
    join()
    tensor = torch.ones(ROWS, device="cuda")
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    if wait:
        work.wait()
    tensor + 1
    torch.cuda.synchronize()
    work.wait()
    return install.reports
