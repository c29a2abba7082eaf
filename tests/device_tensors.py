"""Tensors that lie in a GPU's memory as far as code can tell, for machines without one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

DEVICE = torch.device("cuda", 0)
TO_HOST = (
    "cpu",
    "item",
    "tolist",
    "__bool__",
    "__int__",
    "__index__",
    "__float__",
    "__len__",
    "__repr__",
)


class DeviceTensor(torch.Tensor):
    """A copy of `host` on `DEVICE`. It refuses what CUDA refuses: NumPy, and work together with tensors on the host.

    The values are kept in a host tensor beside it, on which everything is computed.
    """

    host: torch.Tensor

    def __new__(cls, host: torch.Tensor) -> DeviceTensor:
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, host.shape, strides=host.stride(), dtype=host.dtype, device=DEVICE
        )
        made.host = host
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any, **__: Any) -> Any:
        # `__torch_function__` comes before.
        raise NotImplementedError(f"{func}: nothing is computed on {DEVICE}")

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return cls._on_host(func, args, dict(kwargs or {}))

    @classmethod
    def _on_host(
        cls, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        name = func.__name__
        if name == "__get__":  # device, shape, dtype, ...
            return func(*args)
        if name in ("numpy", "__array__"):
            raise TypeError(
                f"can't convert {DEVICE} device type tensor to numpy. Use Tensor.cpu() first."
            )
        goes = next(
            (
                torch.device(each)
                for each in tree_leaves((args, kwargs))
                if _is_device(name, each)
            ),
            DEVICE,
        )
        if name not in ("copy_", "to", "cpu") and _mixes(name, args, kwargs):
            raise RuntimeError(f"{name}: Expected all tensors to be on the same device")
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        found = func(
            *(_host_of(each) for each in args if not _is_device(name, each)),
            **_host_of(kwargs),
        )
        stays = (
            name in TO_HOST
            or goes.type == "cpu"
            or (name.endswith("_") and type(args[0]) is torch.Tensor)
        )
        return found if stays else tree_map_only(torch.Tensor, cls, found)


def _is_device(name: str, value: Any) -> bool:
    return isinstance(value, torch.device) or (name == "to" and isinstance(value, str))


def _host_of(value: Any) -> Any:
    return tree_map_only(DeviceTensor, lambda each: each.host, value)


def _mixes(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether tensors of both kinds meet; indices may lie on the host, and so may single values."""
    if name == "__getitem__" and isinstance(args[0], DeviceTensor):
        return False
    if name == "__setitem__":
        target, index, value = args
        indices = [
            each for each in tree_leaves(index) if isinstance(each, torch.Tensor)
        ]
        if not indices:
            return False  # a copy
        args = (target, value) if isinstance(target, DeviceTensor) else args
    tensors = [
        each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)
    ]
    return len({isinstance(each, DeviceTensor) for each in tensors if each.dim()}) > 1
