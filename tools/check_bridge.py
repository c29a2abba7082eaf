"""Compare the Megatron-core state that megaverl loads with the state that NVIDIA's Megatron-Bridge loads.

    python tools/check_bridge.py                                     # every architecture that both have
    python tools/check_bridge.py --only Qwen3MoeForCausalLM

For each architecture, megaverl loads a tiny random model of a Hugging Face folder into a Megatron-core model.
Megatron-Bridge converts the same folder for the same model. Every parameter must have the same bits. There is one rank:
with more, Megatron-Bridge sends weights over CUDA.

Prints one line per architecture: how many parameters and elements are equal, and the parameters for which
Megatron-Bridge has no mapping: it expects grouped experts, or norms of Transformer Engine's layers. Exits with 1 if a
parameter differs.

Megatron-Bridge is not a dependency of megaverl: it needs Python 3.12 and an older transformers, so it runs in an
environment of its own. Install it into one that has `requirements/cpu-py312.lock`, without its dependencies, most of
which need CUDA:

    pip install --no-deps 'megatron-bridge==0.6.2' 'transformers==5.12.*' 'tokenizers<=0.23.0' 'huggingface-hub<2' \\
        accelerate datasets einops hydra-core antlr4-python3-runtime==4.9.3 peft
"""

from __future__ import annotations

import argparse
import functools
import importlib.machinery
import logging
import sys
import tempfile
import types
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

# A checkout needs no installation of megaverl.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from megaverl.distributed.grid import GridShape
from megaverl.distributed.groups import Grid, ProcessGroupManager
from megaverl.models.tiny import make_tiny_folder
from megaverl.sharding.model_spec import ARCHITECTURES, ModelSpec
from megaverl.sharding.own_configs import register_config
from megaverl.sharding.weight import listed
from megaverl.workers.megatron_model import MegatronModel
from megaverl.workers.model_options import ModelOptions
from tools.one_rank import start_one_rank

# Modules of Transformer Engine that Megatron-Bridge imports without a check.
TRANSFORMER_ENGINE = (
    "transformer_engine",
    "transformer_engine.common",
    "transformer_engine.common.recipe",
    "transformer_engine.pytorch",
)

# megaverl's modules, and how tensor parallelism cuts their weights.
OWN_MODULES = {
    "BiasedRouter": "replicated",
    "CausalAttention": "column",
    "ReplicatedLinear": "replicated",
}
# Sizes of the tiny models that Megatron-Bridge can load.
SIZES: dict[str, Any] = {
    # It does not pad the vocabulary, which megatron-core pads to a multiple of this.
    "vocab_size": 128,
    # It recognises transposed experts by their shape, so no matrix may be square.
    "intermediate_size": 80,
    "moe_intermediate_size": 48,
}


class Outcome(NamedTuple):
    """Result of one architecture.

    Attributes:
        parameters, elements: numbers that were compared.
        problem: why nothing was compared, or which parameter differs; empty if all are equal.
        differs: a parameter differs.
        unknown: parameters for which Megatron-Bridge has no mapping.
    """

    parameters: int = 0
    elements: int = 0
    problem: str = ""
    differs: bool = False
    unknown: Sequence[str] = ()

    def __str__(self) -> str:
        if self.problem:
            return self.problem
        text = (
            f"{self.parameters:>4} parameters are equal, of {self.elements:,} elements"
        )
        if self.unknown:
            text += f"; no mapping for {', '.join(listed(self.unknown))}"
        return text


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=ARCHITECTURES, metavar="NAME")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    start_one_rank()
    supported = import_bridge().list_supported_models()
    architectures = options.only or ARCHITECTURES
    grid = ProcessGroupManager().grid(GridShape.fit(1))
    differs = False
    with tempfile.TemporaryDirectory() as shared:
        for name in architectures:
            if name not in supported:
                continue
            outcome = compare(Path(shared) / name, name, grid)
            differs |= outcome.differs
            print(f"{name:24}{outcome}", flush=True)
    missing = [name for name in architectures if name not in supported]
    print(f"Megatron-Bridge does not have: {', '.join(missing) or 'none of these'}")
    dist.destroy_process_group()
    return int(differs)


@functools.cache
def import_bridge() -> Any:
    """Import Megatron-Bridge and return its `AutoBridge`.

    Some of its modules import Transformer Engine without a check. Where it is not
    installed, empty modules stand in for it. megatron-core has found out before that it
    is missing, and builds no layer of it.
    """
    import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401  # before the stand-ins

    if importlib.util.find_spec("transformer_engine") is None:
        for name in TRANSFORMER_ENGINE:
            sys.modules[name] = _StandIn(name)
    try:
        from megatron.bridge import AutoBridge
        from megatron.bridge.models.conversion.param_mapping import AutoMapping
    except ImportError as error:
        raise SystemExit(
            f"check_bridge.py: Megatron-Bridge cannot be imported ({error}). Install it as --help says."
        ) from error
    for cls, cut in OWN_MODULES.items():
        AutoMapping.register_module_type(cls, cut)
    return AutoBridge


class _AnyName(type):
    """Type of a class that has every attribute, each a class of the same kind."""

    def __getattr__(cls, name: str) -> Any:
        return _any_attribute(name)


class _StandIn(types.ModuleType):
    """Module in the place of one of Transformer Engine, whose names are empty classes."""

    __version__ = "0.0.0"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name: str) -> Any:
        return _any_attribute(name)


def _any_attribute(name: str) -> Any:
    """Return an empty class of this name. Names of Python's own protocols stay missing."""
    if name.startswith("__"):
        raise AttributeError(name)
    return _AnyName(name, (), {})


def compare(folder: Path, name: str, grid: Grid) -> Outcome:
    """Load a tiny model of one architecture with megaverl, and compare what Megatron-Bridge makes of it."""
    make_tiny_folder(folder, name, **SIZES)
    # transformers has no class that reads some of these folders.
    register_config(name)
    model = MegatronModel(
        ModelSpec.from_folder(folder),
        grid,
        ModelOptions(dtype=torch.float32, seed=0, value_head=False),
    )
    model.load(folder)
    try:
        return _difference(import_bridge().from_hf_pretrained(str(folder)), model)
    except Exception as error:  # theirs: reported
        return Outcome(problem=f"not loaded: {type(error).__name__}: {error}")


def _difference(bridge: Any, model: MegatronModel) -> Outcome:
    """Compare a model's parameters with what Megatron-Bridge makes of the same folder."""
    theirs, pretrained = bridge._model_bridge, bridge.hf_pretrained
    tasks = theirs.build_conversion_tasks(pretrained, model.chunks)
    num_parameters = numel = 0
    for task in tasks:
        # A parameter without a mapping.
        if task is None:
            continue
        weights = theirs.maybe_modify_loaded_hf_weight(
            task.mapping.hf_param, pretrained.state
        )
        converted = task.mapping.hf_to_megatron(weights, task.megatron_module)
        own = _in_their_order(task.param_name, task.param_weight, model.spec)
        num_parameters, numel = num_parameters + 1, numel + own.numel()
        if torch.equal(own, converted):
            continue
        problem = f"{task.param_name}: {list(own.shape)}, Megatron-Bridge has {list(converted.shape)}"
        if own.shape == converted.shape:
            count = int((own != converted).sum())
            problem = f"{task.param_name}: {count:,} of {own.numel():,} elements differ"
        return Outcome(num_parameters, numel, problem, differs=True)
    return Outcome(num_parameters, numel, unknown=_without_mapping(theirs, model))


def _in_their_order(name: str, own: torch.Tensor, spec: ModelSpec) -> torch.Tensor:
    """Return a parameter of megaverl with its rows in Megatron-Bridge's order.

    gpt-oss's files hold the rows of gate and up in turn, and megaverl's layer takes them
    so. Megatron-Bridge moves all rows of the gate to the front.
    """
    if spec.activation == "clamped_swiglu" and ".linear_fc1." in name:
        return torch.cat((own[::2], own[1::2]))
    return own


def _without_mapping(theirs: Any, model: MegatronModel) -> list[str]:
    """Return the names of parameters for which Megatron-Bridge has no mapping."""
    registry = theirs.mapping_registry()
    return [
        name
        for chunk in model.chunks
        for name, _ in chunk.named_parameters()
        if registry.megatron_to_hf_lookup(name) is None
    ]


if __name__ == "__main__":
    sys.exit(main())
