"""Transformer Engine as far as megatron-core's classes over it need it to be built: names, parameters, no kernels.

It cannot be installed without CUDA. Names and shapes are those of Transformer Engine 2's `pytorch/module`.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import nn

VERSION = "2.10.0"


class Module(nn.Module):
    fp8, fp8_calibration = False, False
    fp8_meta: Mapping[str, Any] = {"fp8_checkpoint": False}

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)  # outside of FP8

    def set_extra_state(self, state: torch.Tensor) -> None:
        pass


class Linear(Module):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp_size: int = 1,
        bias: bool = True,
        parallel_mode: str | None = None,
        params_dtype: torch.dtype | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.parallel_mode = parallel_mode
        rows = out_features // tp_size if parallel_mode == "column" else out_features
        columns = in_features // tp_size if parallel_mode == "row" else in_features
        self.weight = nn.Parameter(torch.zeros(rows, columns, dtype=params_dtype))
        self.weight.tensor_model_parallel = True  # whatever the mode


class LayerNormLinear(Linear):
    def __init__(self, in_features: int, out_features: int, **options: Any) -> None:
        super().__init__(in_features, out_features, **options)
        self.layer_norm_weight = nn.Parameter(torch.zeros(in_features, dtype=options.get("params_dtype")))


class GroupedLinear(Module):
    def __init__(self, num_gemms: int, in_features: int, out_features: int, **options: Any) -> None:
        super().__init__()
        self.num_gemms, self.use_bias = num_gemms, False
        for number in range(num_gemms):
            self.register_parameter(f"weight{number}", Linear(in_features, out_features, **options).weight)


class RMSNorm(nn.Module):
    def __init__(self, hidden_size: int, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden_size))


class DotProductAttention(nn.Module):
    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


def get_cpu_offload_context(*_: Any, **__: Any) -> tuple[AbstractContextManager[None], Callable[[Any], Any]]:
    return nullcontext(), lambda each: each


class _Anything(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class Unused(metaclass=_Anything):
    """Whatever else is named on the way, by an import or in a class body."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Every module of the package has every name."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in ("transformer_engine", "transformer_engine_torch"):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        def name_of(name: str) -> Any:
            if name == "__version__":
                return VERSION
            if name.startswith("__"):
                raise AttributeError(name)
            return globals().get(name, Unused)

        module.__getattr__ = name_of  # type: ignore[method-assign]


def install() -> None:
    """Before megatron-core is imported."""
    sys.meta_path.insert(0, Finder())
