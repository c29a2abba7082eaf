"""Types of a conversation: its messages, and the tools that they may call."""

from __future__ import annotations

from typing import Any

# A role and a text, and further fields for tools, as chat templates take them.
Message = dict[str, Any]
# JSON schemas of functions, in the form that chat templates take.
Tools = list[dict[str, Any]]
