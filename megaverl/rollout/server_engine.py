"""`rollout.engine: server`: an engine that sends requests to inference servers which torchrun did not start."""

from __future__ import annotations

import queue
import threading
from base64 import b64encode
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from safetensors import safe_open

from megaverl.errors import RolloutError
from megaverl.platform import platform
from megaverl.rollout.engine import (
    Engine,
    Generation,
    Images,
    Prompts,
    PromptScore,
    Sampling,
    SamplingOptions,
    SavedWork,
    Shapes,
    check_generations,
    check_request,
    options_by_prompt,
)
from megaverl.rollout.prefix_routing import PrefixRouter
from megaverl.rollout.server_api import (
    ExpectedModel,
    InferenceServer,
    ServerLost,
    ServerRefused,
    VLLMServer,
    VLLMShardServer,
)
from megaverl.rollout.server_pool import (
    PublishedWeights,
    ServerPool,
    addresses_of,
    connect,
    token_of,
    watched_file,
)
from megaverl.rollout.vllm_images import image_features
from megaverl.sharding.model_spec import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

    from megaverl.config.roles import RolloutConfig
    from megaverl.distributed.shared_item import SharedItem
    from megaverl.sharding.layout import Layout

T = TypeVar("T")

MOST_THREADS = 512  # concurrent requests of a rank, over all servers


class ServerEngine(Engine):
    """Sends this rank's requests to the servers; see `megaverl.rollout.engine.Engine` for the methods.

    Each rank requests its own share of the samples, each with its seed, so the ranks
    exchange no more data than with engines of their own. The first rank also brings
    weights to the servers (`megaverl.rollout.server_pool`).

    Args:
        model_folder: a Hugging Face folder of the run's model; only its config.json is read.
        config: `rollout`.
        run_dir: folder of the watched file, unless `rollout.servers.file` names another file.
        max_model_len: most tokens of prompt and response together.
        stop_token_ids: tokens that end a response.
        image_token: placeholder token of a part of an image. None: the model takes no images.

    Raises:
        RolloutError: names the servers that this run cannot use, or the environment variable that lacks a token.
    """

    tp_size, tp_rank = 1, 0
    may_rebind = False

    def __init__(
        self,
        model_folder: str | Path,
        config: RolloutConfig,
        *,
        run_dir: Path,
        max_model_len: int,
        stop_token_ids: Sequence[int] = (),
        image_token: int | None = None,
    ) -> None:
        started = dist.is_initialized()
        self.replica = dist.get_rank() if started else 0
        self.num_replicas = dist.get_world_size() if started else 1
        self.saved_work = SavedWork()
        self._counting = threading.Lock()
        self.max_model_len = max_model_len
        self._stop_token_ids = tuple(stop_token_ids)
        self._image_token = image_token
        servers = config.servers
        spec = ModelSpec.outline(model_folder)
        self._servers, self._vocab_size = servers, spec.vocab_size
        token = token_of(servers)
        watched = watched_file(servers, run_dir)
        self.pool = ServerPool(
            lambda: addresses_of(servers, watched),
            lambda url: connect(servers, url, token, CLIENTS.get(servers.transfer)),
            ExpectedModel(spec, max_model_len, takes_images=image_token is not None),
            admits=self.replica == 0,
            # Rounded up: ranks share the limit of each server.
            most_running=-(-servers.max_requests // self.num_replicas),
            turn=self.replica,
            router=PrefixRouter() if servers.routing == "prefix" else None,
            wait_seconds=servers.wait_seconds,
            poll_seconds=servers.poll_seconds,
        )
        # The first rank checks the servers before any other uses them.
        if self.replica == 0:
            self.pool.check()

    def use(self, weights: PublishedWeights, *, live: bool = False) -> None:
        """Generate with these weights from now on. The first rank calls this before the
        others, and brings them to the servers.

        Args:
            live: see `ServerPool.use`.
        """
        self.pool.use(weights, live=live)

    def generate(
        self,
        prompts: Prompts,
        sampling: Sampling,
        seeds: Sequence[int],
        *,
        images: Images | None = None,
    ) -> list[Generation]:
        if self.pool.weights is None:
            raise RolloutError(
                "the servers have no weights yet: reshard before the first generate()."
            )
        check_request(
            prompts,
            sampling,
            seeds,
            max_model_len=self.max_model_len,
            vocab_size=self._vocab_size,
        )
        if not prompts:
            return []
        per_prompt = options_by_prompt(sampling, len(prompts))
        if images is not None and self._image_token is None:
            raise RolloutError("the prompts have images, and the model takes none.")
        # The samples of a group share their images, and the first access makes the
        # tensors. Several threads must not do so at once.
        for image in chain.from_iterable(images or ()):
            _ = image.tensors
        own_images = [()] * len(prompts) if images is None else images

        def request(number: int, server: InferenceServer) -> Generation:
            prompt = list(prompts[number])
            features = self._features(number, prompt, own_images[number])
            return self._by(server, prompt, per_prompt[number], seeds[number], features)

        with self.pool.watched():
            generations = self._all(prompts, request, self.on_finished)
        check_generations(generations, len(prompts))
        return generations

    def score_prompts(self, prompts: Prompts) -> list[PromptScore]:
        if self.pool.weights is None:
            raise RolloutError(
                "the servers have no weights yet: reshard before the first score_prompts()."
            )
        check_request(
            prompts,
            SamplingOptions(max_tokens=1),
            [0] * len(prompts),
            max_model_len=self.max_model_len,
            vocab_size=self._vocab_size,
        )
        with self.pool.watched():
            return self._all(
                prompts,
                lambda number, server: server.score_prompt(list(prompts[number])),
            )

    def _all(
        self,
        prompts: Prompts,
        request: Callable[[int, InferenceServer], T],
        on_finished: Callable[[int, T], None] | None = None,
    ) -> list[T]:
        """Send a request for each prompt to the servers, and return the answers in order.

        Args:
            request: sends the request for the prompt of a number to a server.
            on_finished: called with each answer as it arrives.
        """
        # Threads take prompts in order, which need not be the order of completion.
        waiting = deque(range(len(prompts)))
        finished: queue.SimpleQueue[tuple[int, T | Exception]] = queue.SimpleQueue()
        stop = threading.Event()

        def work() -> None:
            # Threads stop taking prompts after the first failure.
            while not stop.is_set():
                try:
                    number = waiting.popleft()
                except IndexError:
                    return
                try:
                    answer = self._one(
                        number, list(prompts[number]), request, stop.is_set
                    )
                    finished.put((number, answer))
                except Exception as error:
                    # Raised again by the thread that collects responses.
                    finished.put((number, error))

        for _ in range(min(len(prompts), MOST_THREADS)):
            # Daemon threads, since waiting for a dead server must not keep a failed run
            # from ending.
            threading.Thread(target=work, name="request", daemon=True).start()
        answers: dict[int, T] = {}
        try:
            while len(answers) < len(prompts):
                # Responses arrive in any order, and are returned in that of the
                # prompts.
                number, result = finished.get()
                if isinstance(result, Exception):
                    raise result
                answers[number] = result
                if on_finished is not None:
                    on_finished(number, result)
        finally:
            stop.set()
        return [answers[number] for number in range(len(prompts))]

    def _features(
        self, number: int, prompt: list[int], images: Sequence[SharedItem]
    ) -> dict[str, Any] | None:
        """Return the images of a prompt as a request carries them, or None if it has none."""
        if not images:
            return None
        assert self._image_token is not None
        return image_features(self._image_token, prompt, images, number)

    def _one(
        self,
        number: int,
        prompt: list[int],
        request: Callable[[int, InferenceServer], T],
        stopped: Callable[[], bool],
    ) -> T:
        """Send one request to any server. A server that is lost costs time, but not the sample."""
        error: ServerLost | None = None
        for _ in range(1 + self._servers.retries):
            with self.pool.server_for(prompt, stopped) as member:
                try:
                    return request(number, member.server)
                except ServerLost as lost:
                    self.pool.lost(member, lost)
                    error = lost
                except ServerRefused as refused:
                    raise RolloutError(f"prompt {number}: {refused}") from refused
        raise RolloutError(
            f"prompt {number}: {1 + self._servers.retries} servers were lost over it (rollout.servers.retries). "
            f"The last one: {error}"
        ) from error

    def _by(
        self,
        server: InferenceServer,
        prompt: list[int],
        sampling: SamplingOptions,
        seed: int,
        features: Mapping[str, Any] | None,
    ) -> Generation:
        weights = self.pool.weights
        assert weights is not None
        generation, versions = server.generate(
            prompt, sampling, sampling.stop_tokens(self._stop_token_ids), seed, features
        )
        # Weights may change between choosing the server and its answer.
        if other_versions := set(versions) - {weights.name}:
            raise ServerLost(
                f"{server.url}: answered with weights {', '.join(other_versions)}, not with {weights.name}."
            )
        if generation.finish_reason not in ("stop", "length"):
            raise ServerLost(
                f"{server.url}: a response ended with {generation.finish_reason!r}."
            )
        # Threads share the counter.
        with self._counting:
            self.saved_work.by_server[urlsplit(server.url).netloc] += 1
        return generation

    def named_parameters(self) -> dict[str, Tensor]:
        return {}

    def layouts(self, shapes: Shapes) -> Callable[[int], Layout]:
        raise RolloutError(
            "rollout.engine=server: servers do not expose their weights as parameters."
        )

    def close(self) -> None:
        """Stop watching the servers. They keep running."""
        self.pool.close()


# --- weights over NCCL ---------------------------------------------------------------------------------------------

# Dtypes of exported weights.
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class TensorOutline(NamedTuple):
    """Name, dtype and shape of a tensor that will be sent (vLLM's `ParamMeta`)."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class FolderWeights:
    """The weights of a Hugging Face folder in the form that vLLM's senders read (its `WeightSource`)."""

    def __init__(self, folder: str) -> None:
        self._files = sorted(Path(folder).glob("*.safetensors"))

    def metadata(self) -> list[TensorOutline]:
        """List the outlines of all tensors, in the order in which iteration yields them."""
        outlines = []
        for path in self._files:
            with safe_open(path, framework="pt") as file:
                # Only headers are read here.
                slices = ((name, file.get_slice(name)) for name in sorted(file.keys()))
                outlines += [
                    TensorOutline(
                        name, DTYPES[part.get_dtype()], tuple(part.get_shape())
                    )
                    for name, part in slices
                ]
        return outlines

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for path in self._files:
            with safe_open(path, framework="pt", device=str(platform.device)) as file:
                yield from (
                    (name, file.get_tensor(name)) for name in sorted(file.keys())
                )


class VLLMOverNCCL(VLLMServer):
    """A vLLM server to which this process sends weights over NCCL, so that the server need not see the folder.

    This process and the server's workers form one communicator. It is made with the
    first weights, and again after a failure. The sender is vLLM's own (0.32,
    `vllm/distributed/weight_transfer`).
    """

    start_with = 'megaverl serve rollout MODEL --vllm="--weight-transfer-config \'{\\"backend\\": \\"nccl\\"}\'".'
    packed: ClassVar[bool] = True  # many tensors in one message
    # One lock for all servers of this class.
    # One transfer at a time: vLLM's senders share their streams, and servers share the
    # network.
    _turn: ClassVar[threading.Lock] = threading.Lock()
    _communicator: PyNcclCommunicator | None = None

    def problems(self, expected: ExpectedModel) -> list[str]:
        problems = super().problems(expected)
        if not platform.is_cuda:
            problems.append(
                "rollout.servers.transfer=nccl needs a GPU on the rollout's first rank. Use transfer: folder"
            )
        config = self.server_info()["vllm_config"].get("weight_transfer_config")
        if (config or {}).get("backend") != "nccl":
            problems.append(
                f"it takes no weights over NCCL. Start it with: {self.start_with.rstrip('.')}"
            )
        return problems

    def load(self, folder: str) -> None:
        ended: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

        def send() -> None:
            # Reports the error as soon as it occurs, or None at the end.
            try:
                self._send(FolderWeights(folder), ended.put)
            except Exception as error:  # raised again below
                ended.put(error)
            else:
                ended.put(None)

        with self._turn:
            # A daemon thread: a communicator whose peer is gone waits forever unless it
            # is aborted.
            threading.Thread(target=send, name="weights", daemon=True).start()
            try:
                error = ended.get(timeout=self._loading)
            except queue.Empty:
                error = TimeoutError(
                    f"not in {self._loading:g} s (rollout.servers.load_timeout_seconds)"
                )
            if error is not None:
                # The communicator may be broken, and its peer may wait. A new one is
                # made the next time.
                self._hang_up()
        if isinstance(error, RolloutError):
            raise error
        if error is not None:
            raise ServerLost(
                f"{self.url}: did not take the weights of {folder} over NCCL: {error!r}."
            ) from error
        self._forget_cached()

    def _send(
        self, weights: FolderWeights, failed: Callable[[Exception], None]
    ) -> None:
        from vllm.distributed.weight_transfer.nccl_engine import (
            NCCLTrainerWeightTransferEngine,
        )

        sender = NCCLTrainerWeightTransferEngine(
            client=_TransferCalls(self), source=weights, packed=self.packed
        )
        with (
            torch.accelerator.device_index(platform.device.index)
            if platform.is_cuda
            else nullcontext()
        ):
            # Kept over versions. Making it takes seconds.
            if self._communicator is None:
                self._communicator = self._connected(sender, failed)
            sender.model_update_group = self._communicator
            sender.send_weights()
            platform.synchronize()

    def _connected(
        self, sender: Any, failed: Callable[[Exception], None]
    ) -> PyNcclCommunicator:
        """Make the communicator from a unique id that is sent over HTTP with the token.

        No port is opened, and nothing is unpickled.

        Args:
            failed: called at once with the server's error, since this end would otherwise wait in NCCL for its peer.
        """
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
        from vllm.distributed.weight_transfer.nccl_common import (
            NCCLWeightTransferInitInfo,
            uid_init_process_group,
            worker_init_payload,
        )

        answer = self.ask("GET", "/get_world_size")
        size = 1 + int(self._taken("GET /get_world_size", lambda: answer["world_size"]))
        unique_id = bytes(NCCLLibrary().ncclGetUniqueId().internal)
        # Both ends must cut the tensors into the same messages.
        wire = {
            name: getattr(sender, name)
            for name in ("packed", "packed_buffer_size_bytes", "packed_num_buffers")
        }
        text = b64encode(unique_id).decode()
        info = NCCLWeightTransferInitInfo(
            rank_offset=1, world_size=size, nccl_unique_id_b64=text, **wire
        )

        def join() -> None:
            try:
                sender.client.init_weight_transfer_engine(worker_init_payload(info))
            except RolloutError as error:
                failed(error)
                raise

        # Both ends must join the communicator at the same time, so the HTTP request
        # runs in a thread.
        with ThreadPoolExecutor(1) as thread:
            joined = thread.submit(join)
            # Blocks until all of the server's workers have joined.
            communicator = uid_init_process_group(unique_id, 0, size, platform.device)
            joined.result()
        return communicator

    def _hang_up(self) -> None:
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            # This also ends operations that are waiting on the device.
            communicator.destroy()
        with suppress(RolloutError):
            self.ask("POST", "/shutdown_weight_transfer_engine")


class _TransferCalls:
    """The interface that vLLM's sender expects of a server (`VLLMWeightSyncClient`), with the token and a deadline."""

    def __init__(self, server: VLLMOverNCCL) -> None:
        self._server = server

    def _post(self, path: str, body: Any = None) -> None:
        self._server.ask("POST", path, body, timeout=self._server._loading)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._post("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._post("/start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._post("/update_weights", {"update_info": update_info})

    def finish_weight_update(self) -> None:
        self._post("/finish_weight_update")


# rollout.servers.transfer -> client of a server; folder: that of its kind.
CLIENTS: dict[str, type[InferenceServer]] = {
    "direct": VLLMShardServer,
    "nccl": VLLMOverNCCL,
}
