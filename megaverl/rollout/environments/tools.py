"""Tools that a model may call: functions, run in processes of their own, under a time limit."""

from __future__ import annotations

import ast
import atexit
import math
import operator
import os
import queue
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from megaverl.errors import EpisodeError
from megaverl.rewards.line_process import LineProcess, ProcessDied
from megaverl.rollout.environments import tool_worker

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
