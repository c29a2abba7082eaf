"""The public name of `megaverl.trainer.api.settings`."""

from megaverl.trainer.api.settings import get_ppo_config

__all__ = ["get_ppo_config"]
