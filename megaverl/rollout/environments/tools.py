"""Tools that a model may call: functions, run in processes of their own, under a time limit."""

from __future__ import annotations

import ast
import atexit
import json
import math
import operator
import os
import queue
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from megaverl.errors import ConfigError, EpisodeError
from megaverl.rewards.line_process import LineProcess, ProcessDied
from megaverl.rollout.environments import tool_worker
from megaverl.rollout.environments.environment import Codec, Environment, Outcome
from megaverl.rollout.environments.registry import register_environment

START_SECONDS = 60.0
# Tools that come with the package, by the name under which a configuration may list them.
BUILT_IN = {"calculator": "megaverl.rollout.environments.tools:calculate"}


@dataclass(frozen=True)
class ToolLimits:
    """seconds: of one call. memory_mb: of the process. max_characters: of a result.

    allow: out of `network`, `files` (writing), `processes`; nothing of it by default.
    """

    seconds: float = 5.0
    memory_mb: int = 512
    max_characters: int = 2000
    allow: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answer:
    """text: the result, or what went wrong. ok: whether it is a result."""

    text: str
    ok: bool


@dataclass
class ToolBox:
    """A set of tools with up to `size` processes to run them; safe to call from several threads.

    A process that exceeds its time or dies is replaced by another before the next call.

    Args:
        tools: name -> `module:function`, called with keyword arguments.

    Raises:
        EpisodeError: (from `call`) a tool cannot be imported, or no process can be started.
    """

    tools: Mapping[str, str]
    limits: ToolLimits = field(default_factory=ToolLimits)
    size: int = 4
    _free: queue.LifoQueue[LineProcess | None] = field(init=False)

    _shared: ClassVar[dict[tuple[Any, ...], ToolBox]] = {}

    def __post_init__(self) -> None:
        self._free = queue.LifoQueue()
        for _ in range(self.size):
            self._free.put(None)

    @classmethod
    def shared(cls, tools: Mapping[str, str], limits: ToolLimits, size: int) -> ToolBox:
        """The one box of this process for these tools, closed when the process ends."""
        key = (tuple(sorted(tools.items())), limits, size)
        if key not in cls._shared:
            cls._shared[key] = cls(tools, limits, size)
            atexit.register(cls._shared[key].close)
        return cls._shared[key]

    def call(self, name: str, arguments: Mapping[str, Any]) -> Answer:
        """Run one tool; whatever goes wrong inside it is an answer too."""
        if name not in self.tools:
            return Answer(f"there is no tool '{name}'; there are: {', '.join(sorted(self.tools))}", False)
        process = self._free.get()
        try:
            process = process or self._start()
            process.send([name, dict(arguments)])
            found = process.answer(self.limits.seconds)
        except TimeoutError:
            assert process is not None
            process.close()
            process = None
            return Answer(f"{name} took longer than {self.limits.seconds:g} s", False)
        except ProcessDied as died:
            process = None
            return Answer(f"{name} ended its process (code {died.code})", False)
        finally:
            self._free.put(process)
        return Answer(str(found["result"]), True) if "result" in found else Answer(str(found["error"]), False)

    def close(self) -> None:
        """End all processes."""
        # all of them before one is put back, which would be the next to come
        for process in [self._free.get() for _ in range(self.size)]:
            if process is not None:
                process.close()
            self._free.put(None)

    def _start(self) -> LineProcess:
        # Nothing of this process's environment: no keys, no addresses.
        environment = {"PATH": os.defpath, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-I", str(Path(tool_worker.__file__).resolve())]
        process = LineProcess(command, environment, folder=tempfile.gettempdir())
        path = [str(Path(__file__).resolve().parents[3]), os.getcwd(), *filter(None, sys.path)]
        try:
            process.send(
                {
                    "tools": dict(self.tools),
                    "path": list(dict.fromkeys(path)),
                    "memory_mb": self.limits.memory_mb,
                    "max_characters": self.limits.max_characters,
                    "allow": list(self.limits.allow),
                }
            )
            answer = process.answer(START_SECONDS)
        except (TimeoutError, ProcessDied) as error:
            process.close()
            raise EpisodeError(f"tools {', '.join(self.tools)}: their process did not start ({error}).") from error
        if "ready" not in answer:
            process.close()
            raise EpisodeError(f"tools {', '.join(self.tools)}: {answer['error']}. Name them as module:function.")
        return process


_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: getattr(math, name) for name in ("sqrt", "log", "exp", "sin", "cos", "tan", "floor", "ceil", "gcd")
} | {"abs": abs, "min": min, "max": max, "round": round}


def calculate(expression: str) -> str:
    """The value of an arithmetic expression: + - * / // % **, brackets, and a few functions.

    Raises:
        ValueError: anything else.
    """
    if not isinstance(expression, str):  # a model may write a number into its call
        raise ValueError(f"expression must be text, found {expression!r:.80}")
    try:
        value = _value(ast.parse(expression.strip().replace("^", "**"), mode="eval").body)
    except SyntaxError:
        raise ValueError(f"not an expression: {expression[:80]!r}") from None
    return str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else str(value)


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _BINARY[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
        return _FUNCTIONS[node.func.id](*_values(node.args))
    raise ValueError(f"not arithmetic: {ast.unparse(node)[:80]!r}")


def _values(nodes: Sequence[ast.expr]) -> list[Any]:
    return [_value(node) for node in nodes]


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
