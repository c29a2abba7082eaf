"""Text and mappings into dtypes, enum members, functions and dataclasses."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable

import pytest
import torch

from megaverl.config.passthrough import coerce
from megaverl.errors import ConfigError


class Colour(enum.Enum):
    red = 1


@dataclasses.dataclass
class Inner:
    dtype: torch.dtype = torch.float32


@dataclasses.dataclass
class Settings:
    dtype: torch.dtype | None = None
    colour: Colour = Colour.red
    function: Callable | None = None
    inner: Inner | None = None
    text: str = ""
    anything: dict | None = None


def test_each_kind():
    made = coerce(
        Settings,
        {
            "dtype": "torch.bfloat16",
            "colour": "red",
            "function": "torch.nn.init:zeros_",
            "inner": {"dtype": "fp16"},
            "text": "float32",
            "anything": {"dtype": "bf16"},
        },
    )
    assert made == {
        "dtype": torch.bfloat16,
        "colour": Colour.red,
        "function": torch.nn.init.zeros_,
        "inner": Inner(torch.float16),
        "text": "float32",
        "anything": {"dtype": "bf16"},
    }


def test_none_stays_none():
    assert coerce(Settings, {"dtype": None, "function": None}) == {
        "dtype": None,
        "function": None,
    }


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        (
            "no_such_module_here:f",
            "no_such_module_here cannot be imported: ModuleNotFoundError",
        ),
        ("math:no_such_function", "math has no 'no_such_function'"),
        ("math:logg", r"math has no 'logg' \(did you mean 'log.?'\?\)"),
    ],
)
def test_a_function_that_is_not_there(path, problem):
    with pytest.raises(ConfigError, match=rf"actor\.megatron\.function: {problem}"):
        coerce(Settings, {"function": path}, "actor.megatron")


def test_megatrons_own_classes():
    from megaverl.platform import platform

    platform.adapt_megatron()
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import TransformerConfig

    options = coerce(
        TransformerConfig, {"attention_backend": "unfused", "autocast_dtype": "fp16"}
    )
    assert options == {
        "attention_backend": AttnBackend.unfused,
        "autocast_dtype": torch.float16,
    }
    config = OptimizerConfig(
        **coerce(OptimizerConfig, {"exp_avg_dtype": "float32", "lr": 1e-6})
    )
    assert config.exp_avg_dtype == torch.float32
