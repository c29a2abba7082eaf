"""Requirements of passed-through fields: values that need a GPU or an optional package.

megaverl accepts the fields of megatron-core's and vLLM's classes under their own names.
Some values run only with kernels from other packages. Without this check every rank
would fail after a minute of startup. The check imports neither torch nor these
packages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from megaverl.config.errors import ConfigIssue
from megaverl.config.wording import yaml_text
from megaverl.gpus import has_usable_gpu

ENGINE = "transformer_engine"
EMERGING = "emerging_optimizers"
MUON_NEEDS_TEXT = (
    "emerging-optimizers 0.3 (pip install emerging-optimizers==0.3.0; Python 3.12 and "
    "megatron-core 0.19)"
)
# Package -> where to get it, for messages. None of these is installed on every machine
# with a GPU.
SOURCES = {
    ENGINE: "Transformer Engine (pip install 'transformer-engine[pytorch]')",
    "deep_ep": "DeepEP (built from github.com/deepseek-ai/DeepEP)",
    "grouped_gemm": "grouped_gemm (built from github.com/fanshiqing/grouped_gemm)",
    "nvidia_kitchen": "NVIDIA's kitchen",
    EMERGING: MUON_NEEDS_TEXT,
}


@dataclass(frozen=True)
class Need:
    """Requirement of one field, for some of its values.

    Attributes:
        packages: import names of which one must be installed. Empty: a GPU is enough.
        values: the values with this requirement. None: every value except None and False.
        but: what to do instead, as a sentence.
        needs_gpu: whether a GPU is needed besides a package.
    """

    packages: tuple[str, ...] = ()
    values: tuple[Any, ...] | None = None
    but: str = "Leave it out."
    needs_gpu: bool = True

    def is_asked_for(self, value: Any) -> bool:
        """Return whether `value`, or any entry of it if it is a list, has this requirement."""
        if isinstance(value, list):
            return any(self.is_asked_for(item) for item in value)
        if self.values is None:
            return value is not None and value is not False
        return value in self.values


@dataclass(frozen=True)
class FieldMachine:
    """Capabilities of the machine on which the run is meant to start.

    Attributes:
        has_gpu: there is a GPU, and torch can use it.
        has_package: returns whether a package is installed. None: unknown.
        has_fp8: the GPU can multiply matrices in 8 bits.
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
# Found in the sources of megatron-core 0.16 to 0.19 and tried one by one on a CPU. Each
# fails there while the model is built or in its first step.
# `tests/config/test_field_needs.py` repeats the trials.
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
    "moe_enable_deepep": Need(
        ("deep_ep",), but="Use moe_token_dispatcher_type: alltoall."
    ),
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
    "optimizer": Need((EMERGING,), ("muon",), "Use adam.", needs_gpu=False),
    "optimizer_cpu_offload": Need(but="Use {role}.offload.optimizer."),
    "use_precision_aware_optimizer": _ENGINE,
}
DDP_NEEDS: dict[str, Need] = {"nccl_ub": _GPU}
NEEDS: dict[str, dict[str, Need]] = {
    "megatron": MEGATRON_NEEDS,
    "optimizer": OPTIMIZER_NEEDS,
    "ddp": DDP_NEEDS,
}


def why_not_there(
    part: str, name: str, value: Any, machine: FieldMachine, role: str = "actor"
) -> str:
    """Return why the field `name` cannot have this value on `machine`, and what to do instead.

    Returns "" if nothing speaks against it.

    Args:
        part: the mapping that holds the field, a key of `NEEDS`.
        role: role whose section holds the mapping, for the suggested key.
    """
    need = NEEDS[part].get(name)
    if need is None or not need.is_asked_for(value):
        return ""
    names = " or ".join(SOURCES.get(package, package) for package in need.packages)
    instead = need.but.format(role=role)
    if need.needs_gpu and not machine.has_gpu:
        shortage = f"needs {names}, which needs a GPU" if names else "needs a GPU"
        return f"{shortage} and is not here. {instead}"
    if name in ("fp8", "fp4") and not machine.has_fp8:
        return (
            f"needs a GPU that multiplies in 8 bits, which this one does not. {instead}"
        )
    if not need.packages or machine.has_package is None:
        return ""
    if any(machine.has_package(package) for package in need.packages):
        return ""
    return f"needs {names}, which is not installed here. Install it, or: {instead}"


def need_mistakes(
    role: str, parts: Mapping[str, Mapping[str, Any]], machine: FieldMachine
) -> Iterator[ConfigIssue]:
    """Yield a mistake for every field of a role that needs something `machine` does not have.

    Args:
        parts: key of `NEEDS` -> that mapping of the role's section.
    """
    for part in NEEDS:
        for name, value in parts.get(part, {}).items():
            if reason := why_not_there(part, name, value, machine, role):
                yield ConfigIssue(
                    f"{role}.{part}.{name}", f"found {yaml_text(value)}, which {reason}"
                )


def fields_of(section: Any) -> dict[str, Mapping[str, Any]]:
    """Return the non-empty mappings of a role's section that `NEEDS` covers, by their key in `NEEDS`."""
    return {
        part: getattr(section, part) for part in NEEDS if getattr(section, part, None)
    }


def without_repeats(
    sections: Mapping[str, Any],
) -> dict[str, dict[str, Mapping[str, Any]]]:
    """Return each role's mappings, leaving out those that equal the actor's.

    Other roles inherit from the actor, so a mistake in such a mapping is reported once,
    for the actor.
    """
    actor = fields_of(sections["actor"]) if "actor" in sections else {}
    roles = {}
    for role, section in sections.items():
        mappings = fields_of(section)
        if role != "actor":
            mappings = {
                part: mapping
                for part, mapping in mappings.items()
                if mapping != actor.get(part)
            }
        roles[role] = mappings
    return {role: mappings for role, mappings in roles.items() if mappings}
