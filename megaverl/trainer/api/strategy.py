"""`RoleBasedDistributedStrategy`: which ranks each role has, looked at before anything is built."""

from __future__ import annotations

from collections.abc import Mapping

from megaverl.config import Config
from megaverl.config.grids import resolve_placement, role_grids, used_roles
from megaverl.trainer.api.devices import DataParallelConfig, Devices, placement_of
from megaverl.trainer.api.settings import Description, resolve


class RoleBasedDistributedStrategy:
    """Each role on devices of its own: another form of the section `placement`.

    strategy = RoleBasedDistributedStrategy(DataParallelConfig(actor_devices=[0, 1], critic_devices=[2, 3]))
    strategy.resolve_for(config, world_size=4)["critic"]        # (2, 3)
    RLTrainer(config, strategy=strategy).train()

    Args:
        devices: a DataParallelConfig, or a mapping of role to devices.
        roles: the same as keywords: actor=[0, 1], critic="cuda:2-3".

    Raises:
        ConfigError: roles that there are not, devices that cannot be read.
    """

    def __init__(self, devices: DataParallelConfig | Mapping[str, Devices] | None = None, **roles: Devices) -> None:
        self.placement = placement_of(devices) | placement_of(roles)

    def resolve_for(self, config: Description, world_size: int) -> dict[str, tuple[int, ...]]:
        """Every role's ranks in a job of so many.

        Raises:
            ConfigError: lists all that does not fit.
        """
        checked = self.apply(config, check_paths=False)
        grids = role_grids(checked, used_roles(checked, "train"))
        return dict(resolve_placement(checked.placement, grids, world_size).ranks)

    def apply(self, config: Description, *, check_paths: bool = True) -> Config:
        """The configuration with this placement."""
        values = resolve(config, check_paths=check_paths).to_dict()
        return resolve({**values, "placement": self.placement}, check_paths=check_paths)
