"""The door to `megaverl.api.settings`."""

from megaverl.api.settings import get_ppo_config

__all__ = ["get_ppo_config"]
