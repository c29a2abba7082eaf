"""Environment `tools`: functions that a model may call, run in separate processes under a time limit."""

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
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from megaverl.errors import ConfigError, EnvironmentFault, EpisodeError
from megaverl.outside import clean, read_json
from megaverl.plugins import absolute_name, search_working_folder
from megaverl.rewards.line_process import LineProcess, ProcessDied
from megaverl.rewards.sandbox import why_not_here
from megaverl.rollout.environments import tool_worker
from megaverl.rollout.environments.environment import (
    Codec,
    Environment,
    Outcome,
    register_environment,
)
from megaverl.rollout.environments.tool_kinds import (
    Answer,
    MCPTools,
    PythonTool,
    SearchTool,
    ToolProvider,
)

START_SECONDS = 60.0
# Tools that come with the package, by the name under which a configuration may list
# them.
BUILT_IN = {"calculator": "megaverl.rollout.environments.tools:calculate"}


@dataclass(frozen=True)
class ToolLimits:
    """Limits of a tool.

    Attributes:
        seconds: time of one call.
        memory_mb: memory of the process.
        max_characters: length of a result.
        allow: permissions out of `network`, `files` (writing) and `processes`; none by default.
        blame: whose doing it is if a call takes too long, ends its process or raises something else than an error of
            its arguments: `policy` (the model reads it) or `environment` (a fault). None: the environment's for the
            tools of an MCP server, the policy's for all others. A lost connection is always a fault.
    """

    seconds: float = 5.0
    memory_mb: int = 512
    max_characters: int = 2000
    allow: tuple[str, ...] = ()
    blame: str | None = None


@dataclass
class ToolBox:
    """Functions that run in up to `size` processes; thread-safe.

    A process that exceeds its time or dies is replaced before the next call.

    Args:
        tools: name -> `module:function`, called with keyword arguments.

    Raises:
        EpisodeError: (from `call`) a tool cannot be imported, or no process can be started.
    """

    tools: Mapping[str, str]
    limits: ToolLimits = field(default_factory=ToolLimits)
    size: int = 4
    _free: queue.LifoQueue[LineProcess | None] = field(init=False)

    def __post_init__(self) -> None:
        self._free = queue.LifoQueue()
        for _ in range(self.size):
            self._free.put(None)

    def call(self, name: str, arguments: Mapping[str, Any]) -> Answer:
        """Run one tool. Errors inside it become an answer."""
        blames_environment = self.limits.blame == "environment"
        process = self._free.get()
        try:
            process = process or self._start()
            process.send([name, dict(arguments)])
            reply = process.answer(self.limits.seconds)
        except TimeoutError:
            assert process is not None
            process.close()
            process = None
            text = f"{name} took longer than {self.limits.seconds:g} s"
            return Answer(text, False, blames_environment)
        except ProcessDied as died:
            process = None
            text = f"{name} ended its process (code {died.code})"
            return Answer(text, False, blames_environment)
        finally:
            self._free.put(process)
        if not isinstance(reply, dict) or not reply.keys() & {"result", "error"}:
            text = f"{name} wrote what is no answer into its process's channel"
            return Answer(text, False, blames_environment)
        if "result" in reply:
            return Answer(str(reply["result"]), True)
        cause = reply.get("cause")
        is_fault = cause == "connection" or (blames_environment and cause == "tool")
        return Answer(str(reply["error"]), False, is_fault)

    def close(self) -> None:
        """End all processes."""
        # Take all processes out before putting one back: the queue would return that
        # one again.
        for process in [self._free.get() for _ in range(self.size)]:
            if process is not None:
                process.close()
            self._free.put(None)

    def _start(self) -> LineProcess:
        # Do not pass on this process's environment, which may hold keys and addresses.
        environment = {"PATH": os.defpath, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-I", str(Path(tool_worker.__file__).resolve())]
        process = LineProcess(command, environment, folder=tempfile.gettempdir())
        search_working_folder()
        path = [str(Path(__file__).resolve().parents[3]), *filter(None, sys.path)]
        try:
            process.send(
                {
                    "tools": {
                        name: absolute_name(target)
                        for name, target in self.tools.items()
                    },
                    "path": list(dict.fromkeys(path)),
                    "memory_mb": self.limits.memory_mb,
                    "max_characters": self.limits.max_characters,
                    "allow": list(self.limits.allow),
                }
            )
            answer = process.answer(START_SECONDS)
        except (TimeoutError, ProcessDied) as error:
            process.close()
            raise EpisodeError(
                f"tools {', '.join(self.tools)}: their process did not start ({error})."
            ) from error
        if "ready" not in answer:
            process.close()
            raise EpisodeError(
                f"tools {', '.join(self.tools)}: {answer['error']} Name them as module:function "
                "or path/to/file.py:function."
            )
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
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: getattr(math, name)
    for name in ("sqrt", "log", "exp", "sin", "cos", "tan", "floor", "ceil", "gcd")
} | {"abs": abs, "min": min, "max": max, "round": round}


def calculate(expression: str) -> str:
    """Evaluate an arithmetic expression with + - * / // % **, brackets and a few functions.

    Raises:
        ValueError: the text is anything else.
    """
    # A model may write a number into its call.
    if not isinstance(expression, str):
        raise ValueError(f"expression must be text, found {expression!r:.80}")
    try:
        value = _value(
            ast.parse(expression.strip().replace("^", "**"), mode="eval").body
        )
    except SyntaxError:
        raise ValueError(f"not an expression: {expression[:80]!r}") from None
    return (
        str(int(value))
        if isinstance(value, float) and value.is_integer() and abs(value) < 1e15
        else str(value)
    )


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _BINARY[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in _FUNCTIONS
    ):
        return _FUNCTIONS[node.func.id](*_values(node.args))
    raise ValueError(f"not arithmetic: {ast.unparse(node)[:80]!r}")


def _values(nodes: Sequence[ast.expr]) -> list[Any]:
    return [_value(node) for node in nodes]


# Syntax of a call in Qwen and Hermes models: a JSON object with a name and arguments.
JSON_CALL = r"<tool_call>\s*(\{.*?\})\s*</tool_call>"
KINDS = ("network", "files", "processes")
OWN_LIMITS = ("seconds", "memory_mb", "max_characters", "allow", "blame")
BLAMES = ("policy", "environment")
# Wait before a call is tried again. Each later wait is twice as long.
RETRY_SECONDS, LONGEST_WAIT = 0.1, 5.0
SPECS = ("function", "python", "search", "mcp")


class ToolSet:
    """All tools of a configuration, with their limits.

    Raises:
        ConfigError: a tool is specified wrongly.
        EpisodeError, DataError: something that a tool needs does not exist.
    """

    _shared: ClassVar[dict[str, ToolSet]] = {}
    _sharing: ClassVar[threading.Lock] = threading.Lock()

    def __init__(
        self, tools: Mapping[str, Any] | Sequence[str], limits: ToolLimits, workers: int
    ) -> None:
        self.tools: dict[str, ToolProvider] = {}
        functions: dict[ToolLimits, dict[str, str]] = {}
        for name, spec in tool_specs(tools).items():
            tool_limits = replace(
                limits, **{key: spec[key] for key in OWN_LIMITS if key in spec}
            )
            tool_limits = replace(tool_limits, allow=tuple(tool_limits.allow))
            if "python" in spec:
                self.tools[name] = PythonTool(
                    tool_limits.seconds,
                    tool_limits.memory_mb,
                    tool_limits.max_characters,
                    workers,
                )
            elif "search" in spec:
                self.tools[name] = SearchTool(
                    spec["search"],
                    spec.get("results", 3),
                    tool_limits.seconds,
                    tool_limits.max_characters,
                )
            elif "mcp" in spec:
                server = MCPTools(
                    spec["mcp"],
                    tool_limits.seconds,
                    tool_limits.max_characters,
                    late_is_fault=tool_limits.blame != "policy",
                )
                self.tools |= dict.fromkeys(server.tools, server)
            else:
                functions.setdefault(tool_limits, {})[name] = spec["function"]
        for tool_limits, targets in functions.items():
            self.tools |= dict.fromkeys(targets, ToolBox(targets, tool_limits, workers))

    @classmethod
    def shared(
        cls, tools: Mapping[str, Any] | Sequence[str], limits: ToolLimits, workers: int
    ) -> ToolSet:
        """Return this process's tools for this specification. They are closed when the process ends."""
        key = json.dumps([tools, asdict(limits), workers], sort_keys=True)
        with cls._sharing:
            if key not in cls._shared:
                cls._shared[key] = cls(tools, limits, workers)
                atexit.register(cls._shared[key].close)
            return cls._shared[key]

    def call(self, name: str, arguments: Mapping[str, Any]) -> Answer:
        """Run one tool. Errors inside it become an answer."""
        if name not in self.tools:
            return Answer(
                f"there is no tool '{name}'; there are: {', '.join(sorted(self.tools))}",
                False,
            )
        answer = self.tools[name].call(name, arguments)
        return Answer(clean(answer.text), answer.ok, answer.is_fault)

    def close(self) -> None:
        """End all processes and connections of the tools."""
        for tool_ in {id(tool): tool for tool in self.tools.values()}.values():
            tool_.close()


@register_environment("tools")
class ToolUse(Environment):
    """Environment in which the model may call tools before its final answer.

    The run's rewards score the final answer. The environment itself gives only
    `call_reward` and `error_reward`.

    Options:
        tools: a list of built-in names (calculator, python), or name -> `module:function`, or name -> a mapping with
            one of
            `function: module:function`; `python: true` (runs its argument `code`, confined); `search: FILE` (searches
            its argument `query` in a JSONL file of documents or an index, `results` passages); `mcp: URL` or
            `mcp: [COMMAND, ...]` (all tools of that server, under their own names); and, for this tool alone, seconds,
            memory_mb, max_characters, allow, blame.
        call: a regular expression with one group. If there is one tool and the group is not a JSON object, the group is
            that tool's single argument, named `argument`. Otherwise it is a JSON object {"name": ..., "arguments":
            {...}}.
        argument: see `call`.
        result, error: formats of an answer; {text} is replaced.
        role: role of an answer's message under a chat template.
        calls: limit of calls in one turn, which run in parallel; further ones are ignored.
        seconds, memory_mb, max_characters, allow, blame: see `ToolLimits`.
        retries: further calls after a fault, before the episode counts as failed (`environment.faults`).
        workers: processes on each rank.
        call_reward: reward of a turn whose calls all succeed.
        error_reward: reward of a turn with a call that fails.
    """

    waits: ClassVar[bool] = True

    def __init__(
        self,
        codec: Codec,
        *,
        tools: Mapping[str, Any] | Sequence[str] = ("calculator",),
        call: str = JSON_CALL,
        argument: str = "expression",
        result: str = "{text}",
        error: str = "error: {text}",
        role: str = "tool",
        calls: int = 1,
        seconds: float = 5.0,
        memory_mb: int = 512,
        max_characters: int = 2000,
        allow: Sequence[str] = (),
        blame: str | None = None,
        retries: int = 2,
        workers: int = 2,
        call_reward: float = 0.0,
        error_reward: float = 0.0,
    ) -> None:
        super().__init__(codec)
        limits = ToolLimits(seconds, memory_mb, max_characters, tuple(allow), blame)
        self.box = ToolSet.shared(tools, limits, workers)
        self.call, self.argument, self.role = (
            re.compile(call, re.DOTALL),
            argument,
            role,
        )
        self.result, self.error, self.calls = result, error, calls
        self.call_reward, self.error_reward = call_reward, error_reward
        self.retries = retries

    @staticmethod
    def check(**options: Any) -> None:
        """Raise a ConfigError for options that cannot be used."""
        specs = tool_specs(options.get("tools", ("calculator",)))
        try:
            pattern = re.compile(options.get("call", JSON_CALL))
        except re.error as error:
            raise ConfigError(
                f"environment 'tools': call is no regular expression ({error})"
            ) from error
        if pattern.groups != 1:
            raise ConfigError(
                f"environment 'tools': call needs one group, the call itself; it has {pattern.groups}"
            )
        if not (isinstance(retries := options.get("retries", 0), int) and retries >= 0):
            raise ConfigError(
                f"environment 'tools': retries is {retries!r}; expected 0 or more"
            )
        if not (isinstance(calls := options.get("calls", 1), int) and calls > 0):
            raise ConfigError(
                f"environment 'tools': calls is {calls!r}; expected 1 or more"
            )
        for settings in (options, *specs.values()):
            if unknown := [
                kind for kind in settings.get("allow", ()) if kind not in KINDS
            ]:
                raise ConfigError(
                    f"environment 'tools': allow knows {', '.join(KINDS)}; found {', '.join(unknown)}"
                )
            if settings.get("blame") not in (None, *BLAMES):
                raise ConfigError(
                    f"environment 'tools': blame is {settings['blame']!r}; expected {' or '.join(BLAMES)}"
                )
        if any("python" in spec for spec in specs.values()) and (
            reason := why_not_here()
        ):
            raise ConfigError(f"environment 'tools': python: {reason}")

    def step(self, token_ids: Sequence[int]) -> Outcome:
        """Run the calls of the turn, or end the episode if it has none.

        Raises:
            EnvironmentFault: a tool fails through no fault of the policy, also when it is called again.
        """
        text = self.codec.decode(token_ids)
        calls = [
            match.group(1) for match in islice(self.call.finditer(text), self.calls)
        ]
        if not calls:
            return Outcome(done=True)
        if len(calls) == 1:
            answers = [self._answer(calls[0])]
        else:
            with ThreadPoolExecutor(len(calls), thread_name_prefix="tool") as pool:
                answers = list(pool.map(self._answer, calls))
        forms = [
            (self.result if answer.ok else self.error).replace("{text}", answer.text)
            for answer in answers
        ]
        reward = (
            self.call_reward
            if all(answer.ok for answer in answers)
            else self.error_reward
        )
        return Outcome(
            self.codec.answer("\n".join(forms), token_ids, role=self.role), reward
        )

    def _answer(self, call: str) -> Answer:
        try:
            name, arguments = self._read(call)
        except ValueError as mistake:
            return Answer(str(mistake), False)
        answer = self.box.call(name, arguments)
        for retry in range(self.retries):
            if not answer.is_fault:
                break
            time.sleep(min(RETRY_SECONDS * 2**retry, LONGEST_WAIT))
            answer = self.box.call(name, arguments)
        if answer.is_fault:
            raise EnvironmentFault(f"environment 'tools': {answer.text}")
        return answer

    def _read(self, call: str) -> tuple[str, Mapping[str, Any]]:
        """Return (name, arguments) of a call.

        Raises:
            ValueError: the call cannot be parsed.
        """
        if len(self.box.tools) == 1 and not call.lstrip().startswith("{"):
            return next(iter(self.box.tools)), {self.argument: clean(call)}
        content = read_json(call)
        arguments = content.get("arguments", {}) if isinstance(content, dict) else None
        if not isinstance(arguments, dict) or not isinstance(content.get("name"), str):
            raise ValueError('a call is {"name": ..., "arguments": {...}}')
        return content["name"], arguments


def tool_specs(tools: Mapping[str, Any] | Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return name -> specification of every tool as a mapping.

    Raises:
        ConfigError: a specification is wrong.
    """
    if not isinstance(tools, Mapping):
        names = [tools] if isinstance(tools, str) else list(tools)
        unknown = [name for name in names if name not in (*BUILT_IN, "python")]
        if unknown or not names:
            raise ConfigError(
                f"environment 'tools': no built-in tool {', '.join(map(repr, unknown))}; there are: "
                f"{', '.join(BUILT_IN)}, python; name your own as a mapping, tools: {{NAME: module:function}}"
            )
        return {
            name: {"python": True} if name == "python" else {"function": BUILT_IN[name]}
            for name in names
        }
    if not tools:
        raise ConfigError("environment 'tools': no tool: name each as module:function")
    specs = {}
    for name, value in tools.items():
        spec = (
            dict(value)
            if isinstance(value, Mapping)
            else {"function": BUILT_IN.get(value, value)}
        )
        kinds = [key for key in spec if key in SPECS]
        allowed = {*SPECS, *OWN_LIMITS}
        if "search" in spec:
            allowed.add("results")
        unknown = [key for key in spec if key not in allowed]
        if len(kinds) != 1 or unknown:
            raise ConfigError(
                f"environment 'tools': {name} has {', '.join(spec) or 'nothing'}; expected one of {', '.join(SPECS)}, "
                f"and in addition {', '.join(OWN_LIMITS)} (results with search)."
            )
        if kinds == ["function"] and not all(str(spec["function"]).partition(":")[::2]):
            raise ConfigError(
                f"environment 'tools': {name}: name each as module:function"
            )
        if kinds == ["mcp"] and not (
            spec["mcp"] and isinstance(spec["mcp"], str | list | tuple)
        ):
            raise ConfigError(
                f"environment 'tools': {name}: mcp is a URL, or a command as a list"
            )
        specs[name] = spec
    return specs
