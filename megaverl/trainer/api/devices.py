"""Device maps of roles, in forms such as "cuda:0-3", [0, 1] or {"model": "cuda:0-3"}."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from megaverl.distributed.placement import parse_ranks
from megaverl.errors import ConfigError

Devices = Sequence[int] | str | int | Mapping[str, Any] | None
FORMS = (
    "[0, 1], 2, '0-3', 'cuda:0-3', 'cuda:0,2', 'cpu:0-1', or {'model': one of these}"
)


def parse_devices(value: Devices, where: str) -> list[int] | None:
    """Return the ranks of a role, or None if `value` is None or "auto".

    A device is a rank, because each process has one device. The word before the colon
    is only informative: every rank computes on the device of its machine.

    Args:
        where: name of the setting, for messages.

    Raises:
        ConfigError: the value has another form. The message names `where`, the value and the valid forms.
    """
    if isinstance(value, Mapping):
        if set(value) != {"model"}:
            raise ConfigError(f"{where}: found {dict(value)!r}; expected {FORMS}.")
        value = value["model"]
    if value is None or value == "auto":
        return None
    if isinstance(value, bool):
        raise ConfigError(f"{where}: found {value}; expected {FORMS}.")
    if isinstance(value, int):
        return _checked([value], where)
    if isinstance(value, str):
        match = re.fullmatch(r"(?:(cuda|gpu|cpu|rank):)?([\d,\s-]+)", value.strip())
        if match is None:
            raise ConfigError(f"{where}: found {value!r}; expected {FORMS}.")
        try:
            return _checked(list(parse_ranks(match[2])), where)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from error
    return _checked(list(value), where)


def _checked(ranks: list[Any], where: str) -> list[int]:
    # bool is a subclass of int, but `true` in a list of ranks is a mistake.
    are_ranks = all(
        isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0
        for rank in ranks
    )
    if not ranks or not are_ranks:
        raise ConfigError(f"{where}: found {ranks!r}; expected {FORMS}.")
    if len(set(ranks)) < len(ranks):
        raise ConfigError(
            f"{where}: found {ranks!r}; a device stands twice. Leave one out."
        )
    return ranks


@dataclass(frozen=True)
class DataParallelConfig:
    """Devices (ranks) of each role. None leaves the decision to the configuration (see docs/placement.md).

    Example:
        DataParallelConfig(actor_devices=[0, 1], critic_devices=[2], reward_model_devices=[3]).set_device_map()
    """

    actor_devices: Devices = None
    critic_devices: Devices = None
    reference_devices: Devices = None
    reward_model_devices: Devices = None
    rollout_devices: Devices = None

    def placement(self) -> dict[str, list[int]]:
        """Return the equivalent section `placement` of a configuration.

        Raises:
            ConfigError: lists every entry that has no valid form.
        """
        placement: dict[str, list[int]] = {}
        mistakes = []
        for field in fields(self):
            try:
                ranks = parse_devices(getattr(self, field.name), field.name)
            except ConfigError as error:
                mistakes.append(str(error))
                continue
            if ranks is not None:
                # The section `placement` names this role `reward`.
                key = field.name.replace("reward_model", "reward")
                placement[key] = ranks
        if mistakes:
            raise ConfigError("\n".join(mistakes))
        return placement

    def set_device_map(self) -> dict[str, list[int]]:
        """Set these devices for all trainers created afterwards (`megaverl.utils.set_device_map`)."""
        return set_device_map(self)


class _DeviceMap:
    """Last value of `set_device_map` in this process, for trainers created afterwards."""

    placement: dict[str, list[int]] = {}


def set_device_map(
    devices: DataParallelConfig | Mapping[str, Devices] | None,
) -> dict[str, list[int]]:
    """Set the devices of roles for every trainer that is created afterwards without its own placement.

    Args:
        devices: a DataParallelConfig, or a mapping of role (actor, critic, reference, reward, reward_model, rollout) to
            devices. None removes the map.

    Returns:
        The equivalent section `placement`: role_devices -> ranks.

    Raises:
        ConfigError: lists every unknown role and every entry that has no valid form.
    """
    _DeviceMap.placement = placement_of(devices)
    return dict(_DeviceMap.placement)


def placement_of(
    devices: DataParallelConfig | Mapping[str, Devices] | None,
) -> dict[str, list[int]]:
    """Return the section `placement` that is equivalent to `devices`, see `set_device_map`.

    Raises:
        ConfigError: lists every unknown role and every entry that has no valid form.
    """
    if devices is None:
        return {}
    if not isinstance(devices, DataParallelConfig | Mapping):
        raise ConfigError(
            f"device map: found {devices!r}; expected a DataParallelConfig or {{'actor': [0, 1], ...}}."
        )
    config = (
        devices if isinstance(devices, DataParallelConfig) else _from_mapping(devices)
    )
    return config.placement()


def device_map() -> dict[str, list[int]]:
    """Return the section `placement` from the last call of `set_device_map`."""
    return dict(_DeviceMap.placement)


def _from_mapping(devices: Mapping[str, Devices]) -> DataParallelConfig:
    names = {
        field.name.removesuffix("_devices"): field.name
        for field in fields(DataParallelConfig)
    }
    names |= {"reward": "reward_model_devices", "model": "actor_devices"}
    unknown = [name for name in devices if name.removesuffix("_devices") not in names]
    if unknown:
        raise ConfigError(
            f"device map: no role {', '.join(map(repr, unknown))}; there are {', '.join(names)}."
        )
    arguments = {
        names[name.removesuffix("_devices")]: value for name, value in devices.items()
    }
    return DataParallelConfig(**arguments)
