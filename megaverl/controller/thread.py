"""Thread of the coordinator's rank that runs the program. The rank's main thread serves calls like any other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from megaverl.controller.zmq_transport import ZmqController
from megaverl.distributed.curve_sockets import Address

T = TypeVar("T")


class ControllerThread(Generic[T]):
    """Thread that runs a program on ranks which connect over sockets.

    Args:
        host: address of this node that the other ranks reach.
        control: runs a controller on the connections to all ranks.
        join_timeout: seconds in which all ranks must connect.

    Example:
        def control(transport: ZmqController) -> Coroutine[Any, Any, None]:
            controller = Controller(transport, 16)
            return controller.run(program(controller))

        thread = ControllerThread("10.0.0.1", 16, control)
        store.set("controller", thread.address.encode())
        ...                       # this rank serves, too
        result = thread.result()  # raises what the program raised
    """

    def __init__(
        self,
        host: str,
        num_ranks: int,
        control: Callable[[ZmqController], Coroutine[Any, Any, T]],
        join_timeout: float = 1800.0,
    ) -> None:
        self._host, self._num_ranks = host, num_ranks
        self._control, self._join_timeout = control, join_timeout
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
            self._result.set_result(asyncio.run(self._serve()))
        except BaseException as error:  # raised again by `result`, on the main thread
            self._result.set_exception(error)
            if not self._address.done():
                self._address.set_exception(error)

    async def _serve(self) -> T:
        transport = ZmqController(self._host, self._num_ranks)
        self._address.set_result(transport.address)
        try:
            await transport.join(self._join_timeout)
            return await self._control(transport)
        finally:
            await transport.close()
