"""A model with tools: a turn that calls one is answered with its result; any other turn is the final answer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from megaverl.errors import ConfigError
from megaverl.rollout.environments.codec import Codec
from megaverl.rollout.environments.environment import Environment, Outcome
from megaverl.rollout.environments.registry import register_environment
from megaverl.rollout.environments.tools import BUILT_IN, ToolBox, ToolLimits

# How Qwen and Hermes models write a call: a JSON object with a name and arguments.
JSON_CALL = r"<tool_call>\s*(\{.*\})\s*</tool_call>"
KINDS = ("network", "files", "processes")


@register_environment("tools")
class ToolUse(Environment):
    """The rewards of the run score the final answer; the environment gives none but `call_reward` and `error_reward`.

    Options:
        tools: name -> `module:function`, or a list of built-in names (calculator).
        call: a regular expression. With one tool and a group that is no JSON object, the group is that tool's one
            argument, named `argument`; otherwise it is a JSON object {"name": ..., "arguments": {...}}.
        argument: see `call`. result, error: how an answer is written; {text} is replaced.
        role: under a chat template, whose message an answer is.
        seconds, memory_mb, max_characters, allow: see `ToolLimits`. workers: processes on each rank.
        call_reward, error_reward: of a turn that calls a tool; of a call that fails.
    """

    waits: ClassVar[bool] = True

    def __init__(
        self,
        codec: Codec,
        *,
        tools: Mapping[str, str] | Sequence[str] = ("calculator",),
        call: str = JSON_CALL,
        argument: str = "expression",
        result: str = "{text}",
        error: str = "error: {text}",
        role: str = "tool",
        seconds: float = 5.0,
        memory_mb: int = 512,
        max_characters: int = 2000,
        allow: Sequence[str] = (),
        workers: int = 2,
        call_reward: float = 0.0,
        error_reward: float = 0.0,
    ) -> None:
        super().__init__(codec)
        limits = ToolLimits(seconds, memory_mb, max_characters, tuple(allow))
        self.box = ToolBox.shared(_targets(tools), limits, workers)
        self.call, self.argument, self.role = re.compile(call, re.DOTALL), argument, role
        self.result, self.error = result, error
        self.call_reward, self.error_reward = call_reward, error_reward

    @staticmethod
    def check(**options: Any) -> None:
        """Raise a ConfigError for options that cannot be used."""
        _targets(options.get("tools", ("calculator",)))
        try:
            pattern = re.compile(options.get("call", JSON_CALL))
        except re.error as error:
            raise ConfigError(f"environment 'tools': call is no regular expression ({error})") from error
        if pattern.groups != 1:
            raise ConfigError(f"environment 'tools': call needs one group, the call itself; it has {pattern.groups}")
        unknown = [kind for kind in options.get("allow", ()) if kind not in KINDS]
        if unknown:
            raise ConfigError(f"environment 'tools': allow knows {', '.join(KINDS)}; found {', '.join(unknown)}")

    def step(self, token_ids: Sequence[int]) -> Outcome:
        """Answer a call, or take the final answer."""
        found = self.call.search(self.codec.decode(token_ids))
        if found is None:
            return Outcome(done=True)
        try:
            name, arguments = self._read(found.group(1))
        except ValueError as mistake:
            return self._answered(token_ids, self.error, str(mistake), self.error_reward)
        answer = self.box.call(name, arguments)
        reward = self.call_reward if answer.ok else self.error_reward
        return self._answered(token_ids, self.result if answer.ok else self.error, answer.text, reward)

    def _answered(self, token_ids: Sequence[int], form: str, text: str, reward: float) -> Outcome:
        return Outcome(self.codec.answer(form.replace("{text}", text), token_ids, role=self.role), reward)

    def _read(self, call: str) -> tuple[str, Mapping[str, Any]]:
        """(name, arguments) of a call.

        Raises:
            ValueError: it cannot be read.
        """
        if len(self.box.tools) == 1 and not call.lstrip().startswith("{"):
            return next(iter(self.box.tools)), {self.argument: call}
        found = json.loads(call)
        arguments = found.get("arguments", {}) if isinstance(found, dict) else None
        if not isinstance(arguments, dict) or not isinstance(found.get("name"), str):
            raise ValueError('a call is {"name": ..., "arguments": {...}}')
        return found["name"], arguments


def _targets(tools: Mapping[str, str] | Sequence[str]) -> dict[str, str]:
    if isinstance(tools, Mapping):
        wrong = [name for name, target in tools.items() if not all(str(target).partition(":")[::2])]
        if wrong or not tools:
            raise ConfigError(f"environment 'tools': {', '.join(wrong) or 'no tool'}: name each as module:function")
        return dict(tools)
    names = [tools] if isinstance(tools, str) else list(tools)
    unknown = [name for name in names if name not in BUILT_IN]
    if unknown or not names:
        raise ConfigError(
            f"environment 'tools': no built-in tool {', '.join(map(repr, unknown))}; there are: "
            f"{', '.join(BUILT_IN)}; name your own as a mapping, tools: {{NAME: module:function}}"
        )
    return {name: BUILT_IN[name] for name in names}
