"""Thread of the coordinator's rank that runs the job's controller. The rank's main thread serves calls as on others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from megaverl.controller.core import Controller
from megaverl.controller.zmq_transport import ZmqController
from megaverl.distributed.curve_sockets import Address

T = TypeVar("T")


class ControllerThread:
    """Thread with the controller of ranks which connect over sockets.

    Args:
        host: address of this node that the other ranks reach.
        make: makes the controller on the connections to all ranks.
        join_timeout: seconds in which all ranks must connect.

    Example:
        thread = ControllerThread("10.0.0.1", 16, lambda transport: Controller(transport, 16))
        store.set("controller", thread.address.encode())
        result = thread.start(program)
        ...                             # this rank serves, too
        result.result()                 # raises what the program raised
        thread.close()
    """

    def __init__(
        self,
        host: str,
        num_ranks: int,
        make: Callable[[ZmqController], Controller],
        join_timeout: float = 1800.0,
    ) -> None:
        self._host, self._num_ranks = host, num_ranks
        self._make, self._join_timeout = make, join_timeout
        self._address: Future[Address] = Future()
        self._controller: Future[Controller] = Future()
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(
            target=self._run, name="megaverl-controller", daemon=True
        )
        self._thread.start()

    @property
    def address(self) -> Address:
        """Address that ranks connect to. Raises OSError if the host's address cannot be bound."""
        return self._address.result()

    def wait_until_joined(self) -> None:
        """Wait until all ranks have connected.

        Raises:
            TrainingStopped: some did not in time; the message names them.
        """
        self._controller.result()

    def start(
        self, program: Callable[[Controller], Coroutine[Any, Any, T]]
    ) -> Future[T]:
        """Start a program. The result is what it returns, or raises what it raises."""
        controller = self._controller.result()
        return asyncio.run_coroutine_threadsafe(
            controller.run(program(controller)), self._loop
        )

    def close(self) -> None:
        """Wait until the other ranks have left the job, and close the connections."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            try:
                runner.run(self._serve())
            # Raised again on the main thread.
            except BaseException as error:
                for future in (self._address, self._controller):
                    if not future.done():
                        future.set_exception(error)

    async def _serve(self) -> None:
        transport = ZmqController(self._host, self._num_ranks)
        self._address.set_result(transport.address)
        try:
            await transport.join(self._join_timeout)
            controller = self._make(transport)
            controller.start()
            self._controller.set_result(controller)
            await self._closing.wait()
            await controller.close()
        finally:
            await transport.close()
