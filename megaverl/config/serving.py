"""Section `tinker`: the server of `megaverl serve tinker`."""

from __future__ import annotations

import os
from importlib.util import find_spec
from ipaddress import ip_address
from typing import Annotated

from pydantic import Field

from megaverl.config.errors import ConfigIssue
from megaverl.config.section import Issues, PositiveFloat, Section, Text, rule
from megaverl.config.wording import yaml_text

# The client accepts only keys that begin with it.
KEY_PREFIX = "tml-"


class TinkerConfig(Section):
    """`tinker`: a server with Tinker's API, whose clients train adapters side by side."""

    host: Text = "127.0.0.1"
    """Address of the interface that clients connect to. Any other than the loopback needs token_env."""
    port: Annotated[int, Field(ge=0, le=65_535)] = 8002
    """Port at that interface, on the node of rank 0. 0: any free port."""
    token_env: Text | None = None
    """Variable with the API key that clients must have (TINKER_API_KEY). It begins with tml-. null: any key."""
    model_name: Text | None = None
    """Name of the base model in clients' requests. null: model.path as it is written."""
    session_minutes: PositiveFloat = 10.0
    """Time without a sign of life after which a client's session is over and its adapters are freed. Saved states
    remain."""

    @rule
    def check_access(self, at: str) -> Issues:
        """Refuse an interface that does not exist or that anybody may use, and keys that clients refuse."""
        try:
            is_public = not ip_address(self.host).is_loopback
        except ValueError:
            text = f"found {yaml_text(self.host)}; expected the address of an interface, such as 127.0.0.1."
            yield ConfigIssue(f"{at}.host", text)
            return
        if is_public and self.token_env is None:
            text = "is not the loopback, so anybody in its network could train. Name a variable with an API key."
            yield ConfigIssue(f"{at}.host", text, involves=(f"{at}.token_env",))
        if self.token_env is None:
            return
        key = os.environ.get(self.token_env, "")
        if not key.startswith(KEY_PREFIX) or len(key) == len(KEY_PREFIX):
            text = (
                f"the variable {self.token_env} holds no API key. Set it to one that begins with {KEY_PREFIX}, "
                "as the client demands, on the node of rank 0."
            )
            yield ConfigIssue(f"{at}.token_env", text)

    @rule
    def check_package(self, at: str) -> Issues:
        """Refuse to serve without the client package, which describes the messages."""
        if find_spec("tinker") is None:
            yield ConfigIssue(
                at,
                "needs the package tinker, which describes the messages: pip install 'megaverl[tinker]'.",
            )
