"""Programs of confined processes: a response as a script, or a response and, in a second process, its tests.

Tests call the response's functions through a pipe, as lines of JSON, and get plain values back. So nothing that the
response defines is ever in the process that decides. An object without a plain form stays in its process, and a
`Remote`
represents it in the other.

    tests' process                         response's process
    function(1, 2)   --- {"do": "call", ...} --->   response's function runs
    value            <-- {"value": 3, ...} ------
"""

from __future__ import annotations

import atexit
import builtins
import importlib
import json
import math
import os
import re
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, BinaryIO

# Special methods that tests may call on an object of the response. Python looks them up
# on the class alone, so `Remote` needs each of them.
ON_RESPONSE = (
    "len",
    "getitem",
    "setitem",
    "delitem",
    "contains",
    "iter",
    "next",
    "str",
    "repr",
    "bool",
    "lt",
    "le",
    "gt",
    "ge",
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "neg",
    "abs",
    "int",
    "float",
    "index",
    "enter",
    "exit",
)
FUNCTIONS = (types.FunctionType, types.MethodType)


def run_script(source: str) -> None:
    """Run a whole program, which reads standard input and writes standard output, and end this process."""
    module = types.ModuleType("__main__")
    # The program is the main module, as if it were started by itself.
    sys.modules["__main__"] = module
    status = 0
    # Whatever a program raises is an exit code, not an error of the sandbox.
    try:
        exec(compile(source, "response", "exec"), vars(module))
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    _end(status)


def _end(status: int) -> None:
    """End like an interpreter, but without the parts that existed before the fork."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status & 0xFF)


class RemoteError(Exception):
    """Raised for an exception of the other side that is not one of Python's own."""


class Remote:
    """Proxy of an object in the response's process."""

    def __init__(self, peer: Peer, handle: int) -> None:
        self.__dict__.update(_peer=peer, _handle=handle)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._peer.ask("call", self._handle, args=args, kwargs=kwargs)

    def __getattr__(self, name: str) -> Any:
        return self._peer.ask("get", self._handle, args=(name,))

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("set", self._handle, args=(name, value))

    def __hash__(self) -> int:
        return hash(self._handle)

    def __eq__(self, other: object) -> bool:
        """Compare two objects of the response there. An object of the response never equals a value of the tests."""
        return (
            isinstance(other, Remote)
            and self._peer.ask("special", self._handle, args=("__eq__", other)) is True
        )


def _special(name: str) -> Callable[..., Any]:
    return lambda self, *args: self._peer.ask(
        "special", self._handle, args=(name, *args)
    )


for _name in ON_RESPONSE:
    setattr(Remote, f"__{_name}__", _special(f"__{_name}__"))


class Peer:
    """One side of the pipe.

    Args:
        is_response: whether this side runs the response, and does whatever the other side asks. The tests' side only
            calls functions that it has passed on itself.
    """

    def __init__(
        self, reading: BinaryIO, writing: BinaryIO, *, is_response: bool
    ) -> None:
        self.reading, self.writing, self.is_response = reading, writing, is_response
        self.objects: list[Any] = []

    def send(self, message: Any) -> None:
        """Send a line of JSON."""
        self.writing.write(json.dumps(message).encode() + b"\n")
        self.writing.flush()

    def receive(self) -> Any:
        """Return the other side's next line.

        Raises:
            EOFError: there is none.
        """
        if not (line := self.reading.readline()):
            raise EOFError("the response's process has ended")
        return json.loads(line)

    def ask(
        self,
        action: str,
        handle: int,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Let the other side run something, and apply its changes to lists and mappings in the arguments.

        Raises:
            Exception: the exception that it raised.
        """
        keywords = {key: self.encoded(value) for key, value in (kwargs or {}).items()}
        self.send(
            {
                "do": action,
                "on": handle,
                "args": [self.encoded(value) for value in args],
                "kwargs": keywords,
            }
        )
        # The other side may call back functions that it was given before it answers.
        while "do" in (answer := self.receive()):
            self.serve(answer)
        if "error" in answer:
            kind = getattr(builtins, str(answer["error"]), None)
            if isinstance(kind, type) and issubclass(kind, Exception):
                raise kind(str(answer["message"]))
            raise RemoteError(f"{answer['error']}: {answer['message']}")
        # Lists and mappings in the arguments are changed in place, as a plain call
        # would do.
        for value, after in zip(args, answer["args"], strict=False):
            if isinstance(value, list):
                value[:] = self.decoded(after)
            elif isinstance(value, dict | set):
                value.clear()
                value.update(self.decoded(after))
        return self.decoded(answer["value"])

    def serve(self, request: Mapping[str, Any]) -> None:
        """Carry out one request of the other side, and send the answer."""
        try:
            target = self.objects[request["on"]]
            args = [self.decoded(value) for value in request["args"]]
            kwargs = {
                key: self.decoded(value) for key, value in request["kwargs"].items()
            }
            # Everything else is allowed on the response's side only.
            if request["do"] == "call":
                value = target(*args, **kwargs)
            elif not self.is_response:
                raise PermissionError(
                    "only functions that the tests have passed on can be called"
                )
            elif request["do"] == "get":
                value = getattr(target, args[0])
            elif request["do"] == "set":
                value = setattr(target, args[0], args[1])  # type: ignore[func-returns-value]
            else:
                # Raise Python's own error: list(), for example, asks any object for
                # __len__ and expects TypeError.
                if not hasattr(target, args[0]):
                    raise TypeError(f"{type(target).__name__} has no {args[0]}")
                value = getattr(target, args[0])(*args[1:])
            changed = [
                self.encoded(arg) if isinstance(arg, list | dict | set) else None
                for arg in args
            ]
            self.send({"value": self.encoded(value), "args": changed})
        except Exception as error:
            # A test may expect the response to raise this.
            self.send({"error": type(error).__name__, "message": str(error)})

    def encoded(self, value: Any) -> Any:
        """Encode a value as JSON: plain values by content, Python's own functions by name, other objects by number."""
        if (
            hasattr(value, "tolist")
            and type(value).__module__.partition(".")[0] == "numpy"
        ):
            value = value.tolist()
        if value is None or isinstance(value, bool):
            return value
        # Subclasses become plain values, since the other side does not have the
        # classes.
        for kind in (int, str):
            if isinstance(value, kind):
                return kind(value)
        if isinstance(value, float):
            return (
                float(value)
                if math.isfinite(value)
                else {"t": "float", "v": str(float(value))}
            )
        if isinstance(value, list):
            return [self.encoded(item) for item in value]
        if isinstance(value, dict):
            return {
                "t": "dict",
                "v": [
                    [self.encoded(key), self.encoded(item)]
                    for key, item in value.items()
                ],
            }
        for sequence in (tuple, frozenset, set):
            if isinstance(value, sequence):
                return {
                    "t": sequence.__name__,
                    "v": [self.encoded(item) for item in value],
                }
        if isinstance(value, bytes | bytearray):
            return {"t": "bytes", "v": bytes(value).hex()}
        if isinstance(value, complex):
            return {"t": "complex", "v": [value.real, value.imag]}
        if isinstance(value, types.ModuleType):
            return {"t": "module", "v": value.__name__}
        if isinstance(value, Remote):
            return {"t": "yours", "v": value.__dict__["_handle"]}
        name = getattr(value, "__name__", "")
        if getattr(builtins, name, None) is value:
            return {"t": "builtin", "v": name}
        if not self.is_response and not isinstance(value, FUNCTIONS):
            raise TypeError(
                f"a test cannot give {type(value).__name__} to the response: plain values and functions"
            )
        self.objects.append(value)
        return {"t": "object", "v": len(self.objects) - 1}

    def decoded(self, value: Any) -> Any:
        """Decode a value from JSON."""
        if isinstance(value, list):
            return [self.decoded(item) for item in value]
        if not isinstance(value, dict):
            return value
        kind, held = value["t"], value["v"]
        if kind == "dict":
            return {self.decoded(key): self.decoded(item) for key, item in held}
        if kind in ("tuple", "set", "frozenset"):
            return getattr(builtins, kind)(self.decoded(item) for item in held)
        if kind == "float":
            return float(held)
        if kind == "bytes":
            return bytes.fromhex(held)
        if kind == "complex":
            return complex(*held)
        if kind == "builtin":
            return getattr(builtins, held)
        if kind == "module":
            return (
                importlib.import_module(held)
                if held.partition(".")[0] in sys.stdlib_module_names
                else None
            )
        return self.objects[held] if kind == "yours" else Remote(self, held)


def serve_response(source: str, reading: BinaryIO, writing: BinaryIO) -> None:
    """Run the response's code, send its names to the tests, and serve their requests until they end."""
    module = types.ModuleType("response")
    sys.modules["response"] = module
    peer = Peer(reading, writing, is_response=True)
    try:
        exec(compile(source, "response", "exec"), vars(module))
    except BaseException as error:
        traceback.print_exc()
        peer.send({"failed": f"{type(error).__name__}: {error}"})
        _end(1)
    names = {
        key: peer.encoded(value)
        for key, value in vars(module).items()
        if not key.startswith("_")
    }
    peer.send({"names": names})
    while True:
        try:
            peer.serve(peer.receive())
        except EOFError:
            _end(0)


def run_tests(
    test: Mapping[str, Any], reading: BinaryIO, writing: BinaryIO, verdicts: BinaryIO
) -> None:
    """Run a test and write its verdict: `code` to run, or `call` with `args`, `kwargs` and the `expected` value."""
    try:
        peer = Peer(reading, writing, is_response=False)
        hello = peer.receive()
        if "names" not in hello:
            raise RemoteError(hello["failed"])
        names = _given(peer, hello["names"], test.get("code", ""))
        if "call" in test:
            function = names.get(test["call"])
            if function is None and "Solution" in names:
                function = getattr(names["Solution"](), test["call"])
            if function is None:
                raise NameError(f"the response has no {test['call']}")
            result = function(*test.get("args", ()), **test.get("kwargs", {}))
            if not same(result, test["expected"], float(test.get("tolerance", 0.0))):
                raise AssertionError(
                    f"{test['call']} gave {result!r:.200}, expected {test['expected']!r:.200}"
                )
        else:
            exec(compile(test["code"], "test", "exec"), {**names, "__name__": "test"})
        verdict: dict[str, Any] = {"passed": True}
    except BaseException as error:
        # A test may raise anything, which always counts as a failure.
        verdict = {"passed": False, "error": f"{type(error).__name__}: {error}"[:500]}
    verdicts.write(json.dumps(verdict).encode())
    verdicts.flush()
    os._exit(0)


def _given(peer: Peer, names: Mapping[str, Any], code: str) -> dict[str, Any]:
    """Return the response's names for a test. They cannot replace Python's own names.

    Args:
        code: the test. If it uses `math.x`, the name `math` is the module, whatever the response defines.
    """
    stand_ins = {}
    for name, value in names.items():
        is_module = isinstance(value, dict) and value["t"] == "module"
        is_used_as_one = name in sys.stdlib_module_names and re.search(
            rf"\b{name}\s*\.", code
        )
        if not hasattr(builtins, name) and (is_module or not is_used_as_one):
            stand_ins[name] = peer.decoded(value)
    return stand_ins


def same(value: Any, expected: Any, tolerance: float = 0.0) -> bool:
    """Return whether two plain values are equal. Lists equal tuples, and keys are compared as JSON writes them.

    A key with the value None equals a missing key: rows from Parquet cannot distinguish
    them.
    """
    if isinstance(expected, list | tuple):
        return (
            isinstance(value, list | tuple)
            and len(value) == len(expected)
            and all(same(a, b, tolerance) for a, b in zip(value, expected, strict=True))
        )
    if isinstance(expected, dict) and isinstance(value, dict):
        items, other = _by_text(value.items()), _by_text(expected.items())
        return items.keys() == other.keys() and all(
            same(items[key], other[key], tolerance) for key in items
        )
    if isinstance(value, Remote):
        return False
    if isinstance(expected, float) and isinstance(value, int | float):
        return math.isclose(value, expected, rel_tol=tolerance, abs_tol=tolerance)
    return bool(value == expected)


def _by_text(items: Iterable[tuple[Any, Any]]) -> dict[str, Any]:
    return {
        key if isinstance(key, str) else json.dumps(key): value
        for key, value in items
        if value is not None
    }
