"""Public names that users of similar systems look for here and in `megaverl.utils.config`. The code is elsewhere."""

import sys
from typing import TYPE_CHECKING

from megaverl.lazy_names import lazy_getattr

if TYPE_CHECKING:
    from megaverl.platform.flash_attention import is_flash_attn_available
    from megaverl.trainer.api import set_device_map
    from megaverl.trainer.api.settings import get_ppo_config

__all__ = ["get_ppo_config", "is_flash_attn_available", "set_device_map"]

__getattr__ = lazy_getattr(
    __name__,
    {
        "get_ppo_config": "megaverl.trainer.api.settings",
        # Importing this module loads torch.
        "is_flash_attn_available": "megaverl.platform.flash_attention",
        "set_device_map": "megaverl.trainer.api",
    },
)

# `megaverl.utils.config` is this module too, as os.path is another one's name.
config = sys.modules[f"{__name__}.config"] = sys.modules[__name__]
