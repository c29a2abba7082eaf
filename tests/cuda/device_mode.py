"""The mode under which tensors for the device become fake ones, and all others stay real."""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.cuda.fake_device import HostReads

OF_STORAGES = ("set_", "resize_")  # look at no number


class DeviceMode(TorchDispatchMode):
    """Inside, `device="cuda"` makes fake tensors. What reads them counts, and gets a stand-in of the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._collectives: dict[str, list[int]] = {}
        self._page_locked = 0

    def take_collectives(self) -> dict[str, list[int]]:
        """By name: how often, and the bytes of this rank's tensors; and begin anew."""
        found, self._collectives = self._collectives, {}
        return found

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if _is_device(kwargs.get("device")):
            kwargs["device"] = _with_index(kwargs["device"])
        name = func.overloadpacket.__name__
        tensors = [
            leaf
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        ]
        fakes = [tensor for tensor in tensors if _is_fake(tensor)]
        if func.namespace == "aten" and not (func.is_view or name in OF_STORAGES):
            _check_here(func, fakes)
        if func.namespace == "c10d":
            return self._communicate(func, name, tensors, args, kwargs)
        if name == "_pin_memory" or kwargs.get("pin_memory"):
            locked = (
                func(*args, **kwargs)
                if name == "_pin_memory"
                else self._reserve(func, args, kwargs)
            )
            locked.is_page_locked = True
            return locked
        if name in ("_to_copy", "copy_"):
            self._count_sent(name, args, kwargs)
        if fakes and (read := READS.get(name)) is not None:
            return read(self, func, args, kwargs)
        if any(isinstance(tensor, FakeTensor) for tensor in fakes) or _is_device(
            kwargs.get("device")
        ):
            with self.fake:
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def take_page_locked(self) -> int:
        """Bytes of page-locked memory that was made for copies of the device; and begin anew."""
        found, self._page_locked = self._page_locked, 0
        return found

    def _reserve(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> torch.Tensor:
        """Page-locked memory that the device alone fills: of addresses, since no copy
        of a fake tensor writes it. They are counted, and not against the rank's limit.
        """
        limit, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        locked: torch.Tensor = func(*args, **kwargs)
        if limit != most:
            limit += locked.nbytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, most))
        self._page_locked += locked.nbytes
        return locked

    def _count_sent(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        source = args[name == "copy_"]
        there = (
            _is_device(kwargs.get("device"))
            if name == "_to_copy"
            else _is_fake(args[0])
        )
        if there and not _is_fake(source):
            waits = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
            # A part of page-locked memory is page-locked too.
            pinned = any(
                hasattr(tensor, "is_page_locked") for tensor in (source, source._base)
            )
            HostReads.count_sent(
                ""
                if waits
                else ", not waited for"
                if pinned
                else ", from pageable memory"
            )

    def _communicate(
        self,
        func: Any,
        name: str,
        tensors: Sequence[torch.Tensor],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        """Nothing moves; what would have is counted. The fake process group answers for the others."""
        on = (
            "host"
            if all(not isinstance(tensor, FakeTensor) for tensor in tensors)
            else "device"
        )
        counted = self._collectives.setdefault(f"{name} ({on})", [0, 0])
        counted[0] += 1
        counted[1] += sum(tensor.nbytes for tensor in tensors)
        args, kwargs = tree_map_only(FakeTensor, _empty, (list(args), kwargs))
        return func(*args, **kwargs)


def _check_here(func: Any, fakes: Sequence[torch.Tensor]) -> None:
    """What was emptied (`workers/offload.py`) must not be looked at until it is filled
    again: a GPU would find another tensor's numbers there, or none.
    """
    for tensor in fakes:
        if tensor.numel() and not tensor.untyped_storage().nbytes():
            raise AssertionError(
                f"{func} of {list(tensor.shape)} {tensor.dtype}, which is offloaded"
            )


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    """On the host, of no element, and as long: collectives compare lengths with what they are to be cut into."""
    return torch.empty(tensor.shape[:1] + (0,))


def _is_fake(tensor: torch.Tensor) -> bool:
    """On the device; the storage of a fake tensor, looked at by itself, is one of torch's "meta" device."""
    return isinstance(tensor, FakeTensor) or tensor.device.type == "meta"


def _is_device(value: Any) -> bool:
    return value is not None and torch.device(value).type == "cuda"


def _with_index(device: Any) -> torch.device:
    """Which one is meant: the current one where none is named, as CUDA has it and fake tensors have not."""
    found = torch.device(device)
    return (
        torch.device("cuda", torch.cuda.current_device())
        if found.index is None
        else found
    )


def _item(
    mode: DeviceMode, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    HostReads.count("item")
    return _stand_in(args[0].dtype)


def _stand_in(dtype: torch.dtype) -> Any:
    """What the host gets in place of a value: one token, one step, nothing that overflows."""
    return False if dtype == torch.bool else 0.0 if dtype.is_floating_point else 1


def _equal(
    mode: DeviceMode, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    HostReads.count("equal")
    return True


def _to_copy(
    mode: DeviceMode, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    to = kwargs.get("device")
    if to is None or _is_device(to):
        with mode.fake:
            return func(*args, **kwargs)
    HostReads.count("copy to the host")
    dtype = kwargs.get("dtype") or args[0].dtype
    # Zeros take no memory until they are written.
    whole = torch.zeros if dtype.is_floating_point else torch.ones
    return whole(args[0].shape, dtype=dtype)


def _copy(
    mode: DeviceMode, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    into, source = args[:2]
    if _is_fake(into):
        with mode.fake:
            return func(*args, **kwargs)
    non_blocking = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
    HostReads.count(
        "copy to the host" + (", not waited for" if non_blocking else ""),
        waits=not non_blocking,
    )
    return into


def _all_of(
    mode: DeviceMode, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Of what depends on values for its size: as if all of them were true."""
    HostReads.count(func.overloadpacket.__name__)
    mask = args[0]
    with mode.fake:
        return mask.new_zeros(mask.numel(), mask.dim(), dtype=torch.int64)


def _masked_select(
    mode: DeviceMode, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    HostReads.count("masked_select")
    with mode.fake:
        return torch.broadcast_tensors(args[0], args[1])[0].reshape(-1).clone()


def _index_put(
    mode: DeviceMode, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """One value under a mask is filled in without knowing where (ATen's `canDispatchToMaskedFill`)."""
    masks = [index for index in args[1] if index is not None]
    if args[2].numel() == 1 and all(
        index.dtype in (torch.bool, torch.uint8) for index in masks
    ):
        with mode.fake:
            return func(*args, **kwargs)
    return _index(mode, func, args, kwargs)


def _index(
    mode: DeviceMode, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """A mask as an index has the host wait for the number of what it selects."""
    indices: list[torch.Tensor | None] = []
    for index in args[1]:
        if isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8):
            HostReads.count("index by a mask")
            with mode.fake:
                indices += [
                    torch.zeros(index.numel(), dtype=torch.int64, device="cuda")
                    for _ in range(index.dim())
                ]
        else:
            indices.append(index)
    with mode.fake:
        return func(args[0], indices, *args[2:], **kwargs)


Read = Callable[[DeviceMode, Any, Sequence[Any], Mapping[str, Any]], Any]
READS: dict[str, Read] = {
    "_local_scalar_dense": _item,
    "equal": _equal,
    "_to_copy": _to_copy,
    "copy_": _copy,
    "nonzero": _all_of,
    "masked_select": _masked_select,
    "index": _index,
    "index_put_": _index_put,
}
