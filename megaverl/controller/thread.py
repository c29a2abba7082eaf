"""Thread of the coordinator's rank that runs the program. The rank's main thread serves calls like any other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from megaverl.controller.core import CallTimeouts, Controller, RankWatch
from megaverl.controller.failures import default_name
from megaverl.controller.zmq_transport import Address, ZmqController

T = TypeVar("T")


class ControllerThread(Generic[T]):
    """Thread that runs a program on ranks which connect over sockets.

    Args:
        host: address of this node that the other ranks reach.
        program: makes the program's coroutine from the controller.
        join_timeout: seconds in which all ranks must connect.
        watch, name: see `Controller`.

    Example:
        thread = ControllerThread("10.0.0.1", 16, lambda controller: program(controller))
        store.set("controller", thread.address.encode())
        ...                       # this rank serves, too
        result = thread.result()  # raises what the program raised
    """

    def __init__(
        self,
        host: str,
        num_ranks: int,
        program: Callable[[Controller], Coroutine[Any, Any, T]],
        *,
        join_timeout: float = 1800.0,
        timeouts: CallTimeouts | None = None,
        node_of: Callable[[int], int] = lambda rank: 0,
        log: Callable[[str], None] = print,
        watch: RankWatch | None = None,
        name: Callable[[int], str] = default_name,
    ) -> None:
        self._host, self._num_ranks, self._program = host, num_ranks, program
        self._join_timeout, self._timeouts, self._node_of, self._log = (
            join_timeout,
            timeouts,
            node_of,
            log,
        )
        self._watch, self._name = watch, name
        self._address: Future[Address] = Future()
        self._result: Future[T] = Future()
        self._thread = threading.Thread(
            target=self._run, name="megaverl-program", daemon=True
        )
        self._thread.start()

    @property
    def address(self) -> Address:
        """Address that ranks connect to. Raises OSError if the host's address cannot be bound."""
        return self._address.result()

    def result(self) -> T:
        """Wait until the program has ended; return its result, or raise what it raised."""
        self._thread.join()
        return self._result.result()

    def _run(self) -> None:
        try:
            self._result.set_result(asyncio.run(self._control()))
        except BaseException as error:  # raised again by `result`, on the main thread
            self._result.set_exception(error)
            if not self._address.done():
                self._address.set_exception(error)

    async def _control(self) -> T:
        transport = ZmqController(self._host, self._num_ranks)
        self._address.set_result(transport.address)
        try:
            await transport.join(self._join_timeout)
            controller = Controller(
                transport,
                self._num_ranks,
                timeouts=self._timeouts,
                node_of=self._node_of,
                log=self._log,
                watch=self._watch,
                name=self._name,
            )
            return await controller.run(self._program(controller))
        finally:
            await transport.close()
