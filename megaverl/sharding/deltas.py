"""Rule of which weights `reshard.delta: auto` compares, for transports and for the planner."""

from __future__ import annotations

# Bytes of a compared element. An optimizer's step changes nearly every float32 weight.
AUTO_ITEMSIZE = 2
