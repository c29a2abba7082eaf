"""What values of passed-through fields need: a GPU, or a package that is not installed.

megaverl accepts the fields of megatron-core's and vLLM's classes under their own names. Some of their values compute
only with kernels of other packages. Ranks would find that out after a start of a minute, so it is asked here first,
without importing torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from megaverl.config.errors import ConfigIssue, found
from megaverl.gpus import has_usable_gpu

ENGINE = "transformer_engine"
# Where each package comes from, for messages: none of them is on every machine that has a GPU.
SOURCES = {
    ENGINE: "Transformer Engine (pip install 'transformer-engine[pytorch]')",
    "deep_ep": "DeepEP (built from github.com/deepseek-ai/DeepEP)",
    "grouped_gemm": "grouped_gemm (built from github.com/fanshiqing/grouped_gemm)",
    "nvidia_kitchen": "NVIDIA's kitchen",
}


@dataclass(frozen=True)
class Need:
    """What one field needs where it has a certain value.

    Attributes:
        packages: import names of packages of which one must be installed; empty: a GPU is enough.
        values: the values that need it; None: every value but None and False.
        but: what to do instead.
    """

    packages: tuple[str, ...] = ()
    values: tuple[Any, ...] | None = None
    but: str = "Leave it out."

    def is_asked_for(self, value: Any) -> bool:
        if isinstance(value, list):
            return any(self.is_asked_for(item) for item in value)
        if self.values is None:
            return value is not None and value is not False
        return value in self.values


@dataclass(frozen=True)
class FieldMachine:
    """The machine that a run is for.

    Attributes:
        has_gpu: a GPU is there, and a torch that can use it.
        has_package: says whether a package is installed; None: the packages are not known.
        has_fp8: its GPU multiplies matrices in 8 bits.
    """

    has_gpu: bool
    has_package: Callable[[str], bool] | None = None
    has_fp8: bool = True

    @classmethod
    def here(cls) -> FieldMachine:
        """Return this machine, with the packages of this environment."""
        return cls(has_usable_gpu(), lambda name: find_spec(name) is not None)


_GPU = Need()
_ENGINE = Need((ENGINE,))
# Read in megatron-core 0.16 to 0.19, and tried one by one on a CPU: each fails there while its model is built or in its
# first step. `tests/config/test_field_needs.py` tries them again.
MEGATRON_NEEDS: dict[str, Need] = {
    "attention_backend": Need((ENGINE,), ("flash", "fused"), "Leave it at auto."),
    "apply_rope_fusion": _ENGINE,
    "batch_invariant_mode": _ENGINE,
    "cpu_offloading": Need((ENGINE,), but="Use {role}.activation_checkpointing."),
    "cuda_graph_impl": Need(values=("local", "transformer_engine")),
    "enable_cuda_graph": _GPU,
    "external_cuda_graph": _GPU,
    "fine_grained_activation_offloading": _ENGINE,
    "fp4": _ENGINE,
    "fp8": Need((ENGINE,), but="Leave it out on this machine."),
    "fused_single_qkv_rope": _ENGINE,
    "gradient_accumulation_fusion": Need((ENGINE, "fused_weight_gradient_mlp_cuda")),
    "moe_enable_deepep": Need(("deep_ep",), but="Use moe_token_dispatcher_type: alltoall."),
    "moe_grouped_gemm": Need((ENGINE, "grouped_gemm")),
    "moe_permute_fusion": _ENGINE,
    "moe_router_fusion": _ENGINE,
    "moe_token_dispatcher_type": Need(("deep_ep",), ("flex",), "Use alltoall."),
    "recompute_modules": Need((ENGINE,), ("layernorm",), "Leave layernorm out of it."),
    "symmetric_ar_type": _ENGINE,
    "tp_comm_overlap": _ENGINE,
    "use_kitchen": Need(("nvidia_kitchen",)),
    "use_te_activation_func": _ENGINE,
}
OPTIMIZER_NEEDS: dict[str, Need] = {
    "optimizer_cpu_offload": Need(but="Use {role}.offload.optimizer."),
    "use_precision_aware_optimizer": _ENGINE,
}
DDP_NEEDS: dict[str, Need] = {"nccl_ub": _GPU}
NEEDS: dict[str, dict[str, Need]] = {"megatron": MEGATRON_NEEDS, "optimizer": OPTIMIZER_NEEDS, "ddp": DDP_NEEDS}


def why_not_there(part: str, name: str, value: Any, machine: FieldMachine, role: str = "actor") -> str:
    """Return why a field cannot have this value on a machine, and what to do; empty: nothing is known against it.

    Args:
        part: the mapping: a key of `NEEDS`.
    """
    need = NEEDS[part].get(name)
    if need is None or not need.is_asked_for(value):
        return ""
    names = " or ".join(SOURCES.get(package, package) for package in need.packages)
    instead = need.but.format(role=role)
    if not machine.has_gpu:
        what = f"needs {names}, which needs a GPU" if names else "needs a GPU"
        return f"{what} and is not here. {instead}"
    if name in ("fp8", "fp4") and not machine.has_fp8:
        return f"needs a GPU that multiplies in 8 bits, which this one does not. {instead}"
    if not need.packages or machine.has_package is None:
        return ""
    if any(machine.has_package(package) for package in need.packages):
        return ""
    return f"needs {names}, which is not installed here. Install it, or: {instead}"


def need_mistakes(role: str, parts: Mapping[str, Mapping[str, Any]], machine: FieldMachine) -> Iterator[ConfigIssue]:
    """Yield what a role's mappings ask for and a machine does not have.

    Args:
        parts: by the key of `NEEDS`, the mapping as the configuration has it.
    """
    for part in NEEDS:
        for name, value in parts.get(part, {}).items():
            if why := why_not_there(part, name, value, machine, role):
                yield ConfigIssue(f"{role}.{part}.{name}", f"found {found(value)}, which {why}")


def fields_of(section: Any) -> dict[str, Mapping[str, Any]]:
    """Return a role's mappings by the key of `NEEDS`; those that its section has."""
    return {part: getattr(section, part) for part in NEEDS if getattr(section, part, None)}


def without_repeats(sections: Mapping[str, Any]) -> dict[str, dict[str, Mapping[str, Any]]]:
    """Return every role's mappings but those that are the actor's: an inherited mistake is the actor's."""
    actor = fields_of(sections["actor"]) if "actor" in sections else {}
    roles = {}
    for role, section in sections.items():
        own = fields_of(section)
        if role != "actor":
            own = {part: mapping for part, mapping in own.items() if mapping != actor.get(part)}
        roles[role] = own
    return {role: own for role, own in roles.items() if own}
