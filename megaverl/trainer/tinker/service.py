"""Requests of the clients: sessions, models, sampling clients, and the jobs that they ask for.

Threads of the HTTP server call `TinkerService.answer`. It answers from its own state, or puts
a job into the queue of the program and answers with the id of a promise.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megaverl.data.tokenizers import Tokenizer
from megaverl.outside import read_json
from megaverl.rollout import sample_seed
from megaverl.trainer.tinker.checkpoints import (
    NAME,
    Saved,
    SavedCheckpoints,
    SavedPath,
)
from megaverl.trainer.tinker.messages import (
    CallOutcome,
    PromptRows,
    SavedWeights,
    TokenRows,
)
from megaverl.trainer.tinker.program import (
    AdapterGroup,
    QueuedRequest,
    QueuedSamples,
    RequestQueue,
    succeeded,
)
from megaverl.trainer.tinker.promises import Promise, Promises, RequestFailed
from megaverl.trainer.tinker.protocol import (
    ForwardBackward,
    check_tokens,
    forward_backward_output,
    sample_response,
    text_tokens,
)
from megaverl.trainer.tinker.worker import ADAPTER_FOLDER
from megaverl.workers.adapter_slots import AdamStep

# Longest time that a request for a result stays open. The client gives up after 45 s.
POLL_SECONDS = 20.0
# Snapshots of a model for sampling clients that are kept. A recipe that samples from
# older ones is told to save them under a name.
KEPT_SNAPSHOTS = 16
SWEEP_SECONDS = 30.0
PROTOBUF = "application/x-protobuf"
# Options of a request for samples that this server does not have, and their values if
# they are not used.
NOT_SAMPLED: Mapping[str, Any] = {
    "topk_prompt_logprobs": 0,
    "topk_sample_logprobs": 0,
    "target_prompt_logprobs": None,
    "prompt_alt_tokens_k": 0,
    "record_stability_info": False,
}


class Refusal(Exception):
    """A request that is answered with an HTTP error.

    Attributes:
        status: HTTP status.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class HttpReply(NamedTuple):
    """Answer to a request: a JSON object, or an encoded protocol buffer."""

    body: dict[str, Any] | bytes
    status: int = 200


@dataclass
class ClientSession:
    """A client's connection, which lives as long as its heartbeats."""

    seen: float
    metadata: dict[str, Any] | None = None
    is_over: bool = False


@dataclass
class TrainedModel:
    """A set of adapters that a client trains.

    Attributes:
        answered: request number -> promise, for requests that are sent twice.
    """

    session: str
    metadata: dict[str, Any] | None
    answered: dict[int, Promise] = field(default_factory=dict)


@dataclass
class Sampler:
    """Weights that a client samples from.

    Attributes:
        path: the checkpoint. None: the base model.
        answered: request number -> promise, for requests that are sent twice.
    """

    session: str
    path: SavedPath | None
    answered: dict[int, Promise] = field(default_factory=dict)


@dataclass(frozen=True)
class ServedModel:
    """Description of the base model for clients.

    Attributes:
        name: name that clients give.
        tokenizer: folder or name of its tokenizer.
        max_tokens: longest sequence.
        rank: rank of all adapters.
        trained: sentence about the layers that have adapters.
    """

    name: str
    tokenizer: str
    vocab_size: int
    max_tokens: int
    rank: int
    trained: str


class TinkerService:
    """State of the server, and its answers.

    Args:
        model: the base model.
        tokenizer: decodes responses, for stop texts.
        queue: queue of the program.
        seed: seed of adapters and samples for which the client gives none.
        session_seconds: time without a heartbeat after which a session is over.
    """

    def __init__(
        self,
        model: ServedModel,
        tokenizer: Tokenizer,
        queue: RequestQueue,
        saved: SavedCheckpoints,
        *,
        seed: int,
        session_seconds: float,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._queue = queue
        self._saved = saved
        self._seed = seed
        self._session_seconds = session_seconds
        self._sessions: dict[str, ClientSession] = {}
        self._models: dict[str, TrainedModel] = {}
        self._samplers: dict[str, Sampler] = {}
        self._promises = Promises()
        self._lock = threading.RLock()
        self._swept = time.monotonic()
        self._posts: dict[str, Callable[[dict[str, Any]], HttpReply]] = {
            "auth/token": lambda body: HttpReply({"jwt": ""}),
            "client/config": self._client_config,
            "client/dynamic_config": lambda body: HttpReply(
                {"sample_cancel_enabled": True}
            ),
            "telemetry": lambda body: HttpReply({"status": "accepted"}),
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "create_model": self._create_model,
            "get_info": self._get_info,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "save_weights_for_sampler": self._save_for_sampler,
            "load_weights": self._load_weights,
            "weights_info": self._weights_info,
            "create_sampling_session": self._create_sampler,
            "asample": self._sample,
            "retrieve_future": self._retrieve,
            "cancel_future": self._cancel,
        }

    def answer(self, method: str, path: str, data: bytes) -> HttpReply:
        """Answer one request.

        Args:
            path: below /api/v1/.

        Raises:
            Refusal: it is answered with an HTTP error.
        """
        try:
            if method == "POST" and path == "forward_backward":
                return self._forward_backward(data)
            if method == "POST" and path in self._posts:
                body = read_json(data or b"{}")
                if not isinstance(body, dict):
                    raise Refusal(400, "a request is a JSON object.")
                return self._posts[path](body)
            return self._resource(method, path.split("/"), data)
        except RequestFailed as error:
            raise Refusal(400, str(error)) from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Refusal(
                400,
                f"{path}: the request cannot be read: {type(error).__name__}: {error}",
            ) from error

    def expired_models(self) -> list[str]:
        """Return models whose sessions are over, and forget them. Delete checkpoints whose time has come."""
        now = time.monotonic()
        expired = []
        with self._lock:
            for session in self._sessions.values():
                if now - session.seen > self._session_seconds:
                    session.is_over = True
            for name, model in list(self._models.items()):
                if self._sessions[model.session].is_over:
                    expired.append(name)
                    del self._models[name]
            for name, sampler in list(self._samplers.items()):
                if self._sessions[sampler.session].is_over:
                    del self._samplers[name]
        for name in expired:
            self._saved.delete_ephemeral(name, keep=0)
        if now - self._swept > SWEEP_SECONDS:
            self._swept = now
            self._saved.delete_expired()
        return expired

    # --- sessions ---------------------------------------------------------------------

    def _client_config(self, body: dict[str, Any]) -> HttpReply:
        return HttpReply(
            {
                "pjwt_auth_enabled": False,
                # Parts of a large request then arrive in their order.
                "parallel_fwdbwd_chunks": False,
                "use_pyqwest_transport": False,
                "sample_enable_stuck_detection": False,
            }
        )

    def _create_session(self, body: dict[str, Any]) -> HttpReply:
        name = uuid.uuid4().hex
        with self._lock:
            self._sessions[name] = ClientSession(
                time.monotonic(), body.get("user_metadata")
            )
        return HttpReply({"session_id": name, "info_message": self._model.trained})

    def _heartbeat(self, body: dict[str, Any]) -> HttpReply:
        self._session(body["session_id"])
        return HttpReply({"type": "session_heartbeat"})

    def _session(self, name: str) -> ClientSession:
        """Return a session, which has shown that it is alive."""
        with self._lock:
            session = self._sessions.get(name)
            if session is None or session.is_over:
                raise Refusal(
                    410,
                    f"session {name!r:.60} is unknown or over. Create a new ServiceClient; saved states remain.",
                )
            session.seen = time.monotonic()
        return session

    def _trained(self, name: str) -> TrainedModel:
        with self._lock:
            model = self._models.get(name)
        if model is None:
            raise Refusal(
                410,
                f"model {name!r:.80} is unknown, or its session is over. Load a saved state into a new one.",
            )
        self._session(model.session)
        return model

    # --- models -----------------------------------------------------------------------

    def _create_model(self, body: dict[str, Any]) -> HttpReply:
        name = self._new_model(body)
        lora = body.get("lora_config") or {}
        seed = lora.get("seed")

        async def run(adapters: AdapterGroup) -> dict[str, Any]:
            self._check_model(body, lora)
            number = int(body["model_seq_id"])
            drawn = sample_seed(self._seed, number, 0, "adapters")
            succeeded(await adapters.create(name, drawn if seed is None else int(seed)))
            return {"model_id": name, "type": "create_model"}

        return self._numbered(self._models[name], 0, QueuedRequest, run)

    def _new_model(self, body: Mapping[str, Any]) -> str:
        """Register a model, unless the same request has done so before."""
        session = body["session_id"]
        metadata = body.get("user_metadata")
        self._session(session)
        name = f"{session}:train:{int(body['model_seq_id'])}"
        with self._lock:
            self._models.setdefault(name, TrainedModel(session, metadata))
        return name

    def _check_model(self, body: Mapping[str, Any], lora: Mapping[str, Any]) -> None:
        """Refuse adapters other than those that the server trains."""
        base = body.get("base_model")
        if base not in (None, self._model.name):
            raise RequestFailed(
                f"base_model={base!r:.100}: this server trains {self._model.name}."
            )
        if lora.get("rank", self._model.rank) != self._model.rank:
            raise RequestFailed(
                f"rank={lora['rank']}: all adapters of this server have rank {self._model.rank} (actor.lora.rank)."
            )
        for part in ("train_mlp", "train_attn"):
            if lora.get(part) is False:
                raise RequestFailed(f"{part}=False: {self._model.trained}")
        optimizer = (body.get("optimizer_config") or {}).get("type", "adamw")
        if optimizer != "adamw":
            raise RequestFailed(f"optimizer {optimizer!r:.40}: this server has adamw.")

    def _get_info(self, body: dict[str, Any]) -> HttpReply:
        self._trained(body["model_id"])
        model = self._model
        data = {"model_name": model.name, "tokenizer_id": model.tokenizer}
        return HttpReply(
            {
                "type": "get_info",
                "model_data": data,
                "model_id": body["model_id"],
                "is_lora": True,
                "lora_rank": model.rank,
                "model_name": model.name,
            }
        )

    def _forward_backward(self, data: bytes) -> HttpReply:
        request = ForwardBackward(data)
        model = self._trained(request.model)

        async def run(adapters: AdapterGroup) -> bytes:
            rows = request.rows(self._model.vocab_size, self._model.max_tokens)
            outcome = await adapters.forward_backward(
                request.model, rows, request.loss(), trains=request.trains
            )
            return forward_backward_output(succeeded(outcome))

        return self._numbered(model, request.number, QueuedRequest, run)

    def _optim_step(self, body: dict[str, Any]) -> HttpReply:
        name = body["model_id"]
        model = self._trained(name)

        async def run(adapters: AdapterGroup) -> dict[str, Any]:
            if (given := body.get("adam_params")) is None:
                raise RequestFailed(
                    "this server's optimizer is adamw: give AdamParams."
                )
            settings = AdamStep(
                learning_rate=float(given.get("learning_rate", 1e-4)),
                beta1=float(given.get("beta1", 0.9)),
                beta2=float(given.get("beta2", 0.95)),
                eps=float(given.get("eps", 1e-12)),
                weight_decay=float(given.get("weight_decay", 0.0)),
                max_norm=float(given.get("grad_clip_norm", 0.0)),
            )
            if not (0 <= settings.beta1 < 1 and 0 <= settings.beta2 < 1):
                raise RequestFailed("AdamParams: betas are from 0 to below 1.")
            if settings.learning_rate < 0 or settings.eps < 0:
                raise RequestFailed("AdamParams: learning_rate and eps are 0 or more.")
            outcome = succeeded(await adapters.step(name, settings))
            return {"metrics": outcome.numbers}

        return self._numbered(model, body.get("seq_id"), QueuedRequest, run)

    # --- checkpoints ------------------------------------------------------------------

    def _save_weights(self, body: dict[str, Any]) -> HttpReply:
        name = body["model_id"]
        model = self._trained(name)

        async def run(adapters: AdapterGroup) -> dict[str, Any]:
            path = SavedPath(name, "weights", _checkpoint_name(body))
            overwrite = bool(body.get("overwrite"))
            partial = self._saved.begin(path, overwrite=overwrite)
            succeeded(await adapters.save_state(name, str(partial)))
            self._saved.commit(path, partial, self._described(model, body))
            return {"path": str(path), "type": "save_weights"}

        return self._numbered(model, body.get("seq_id"), QueuedRequest, run)

    def _save_for_sampler(self, body: dict[str, Any]) -> HttpReply:
        name = body["model_id"]
        model = self._trained(name)

        async def run(adapters: AdapterGroup) -> dict[str, Any]:
            number = body.get("sampling_session_seq_id")
            is_ephemeral = body.get("path") is None
            if is_ephemeral and not isinstance(number, int):
                raise RequestFailed("give a name, or the number of a sampling client.")
            file = f"snapshot_{number}" if is_ephemeral else _checkpoint_name(body)
            path = SavedPath(name, "sampler_weights", file)
            partial = self._saved.begin(path, overwrite=True)
            folder = partial / ADAPTER_FOLDER
            succeeded(await adapters.save_adapter(name, str(folder)))
            described = self._described(model, body, is_ephemeral=is_ephemeral)
            self._saved.commit(path, partial, described)
            answer: dict[str, Any] = {"type": "save_weights_for_sampler"}
            if not is_ephemeral:
                return answer | {"path": str(path)}
            self._saved.delete_ephemeral(name, keep=KEPT_SNAPSHOTS)
            sampler = f"{model.session}:sample:{number}"
            with self._lock:
                self._samplers[sampler] = Sampler(model.session, path)
            return answer | {"sampling_session_id": sampler}

        return self._numbered(model, body.get("seq_id"), QueuedRequest, run)

    def _load_weights(self, body: dict[str, Any]) -> HttpReply:
        is_new = body.get("model_id") is None
        name = self._new_model(body) if is_new else body["model_id"]
        model = self._trained(name)

        async def run(adapters: AdapterGroup) -> dict[str, Any]:
            path = SavedPath.parse(body["path"])
            saved = self._saved.find(path)
            self._check_model(body, {"rank": saved.lora_rank})
            if path.kind != "weights":
                raise RequestFailed(
                    f"{path} holds weights for sampling. Load a state that save_state has saved."
                )
            folder = str(self._saved.folder(path))
            outcome = await adapters.load_state(
                name, folder, with_optimizer=bool(body.get("optimizer"))
            )
            succeeded(outcome)
            return {"path": str(path), "model_id": name, "type": "load_weights"}

        return self._numbered(
            model, 0 if is_new else body.get("seq_id"), QueuedRequest, run
        )

    def _described(
        self,
        model: TrainedModel,
        body: Mapping[str, Any],
        *,
        is_ephemeral: bool = False,
    ) -> Saved:
        seconds = body.get("ttl_seconds")
        now = time.time()
        return Saved(
            base_model=self._model.name,
            lora_rank=self._model.rank,
            created=now,
            expires=None if seconds is None else now + int(seconds),
            user_metadata=body.get("user_metadata"),
            model_metadata=model.metadata,
            is_ephemeral=is_ephemeral,
        )

    def _weights_info(self, body: dict[str, Any]) -> HttpReply:
        saved = self._found(SavedPath.parse(body["tinker_path"]))
        return HttpReply(
            {
                "base_model": saved.base_model,
                "is_lora": True,
                "lora_rank": saved.lora_rank,
                "train_unembed": False,
            }
        )

    def _found(self, path: SavedPath) -> Saved:
        try:
            return self._saved.find(path)
        except RequestFailed as error:
            raise Refusal(404, str(error)) from error

    # --- sampling ---------------------------------------------------------------------

    def _create_sampler(self, body: dict[str, Any]) -> HttpReply:
        session = body["session_id"]
        self._session(session)
        name = f"{session}:sample:{int(body['sampling_session_seq_id'])}"
        given = body.get("model_path")
        path = None if given is None else SavedPath.parse(given)
        if path is not None:
            self._found(path)
        elif body.get("base_model") != self._model.name:
            raise Refusal(
                400,
                f"base_model={body.get('base_model')!r:.100}: this server samples from {self._model.name}.",
            )
        with self._lock:
            self._samplers.setdefault(name, Sampler(session, path))
        return HttpReply(
            {"sampling_session_id": name, "type": "create_sampling_session"}
        )

    def _sampler(self, name: str) -> Sampler:
        with self._lock:
            sampler = self._samplers.get(name)
        if sampler is None:
            raise Refusal(
                410, f"sampling client {name!r:.80} is unknown, or its session is over."
            )
        return sampler

    def _sample(self, body: dict[str, Any]) -> HttpReply:
        name = body.get("sampling_session_id")
        if name is None:
            raise Refusal(
                400, "asample needs sampling_session_id: use a SamplingClient."
            )
        sampler = self._sampler(name)
        self._session(sampler.session)
        used = [
            key
            for key, value in NOT_SAMPLED.items()
            if (body.get(key) or value) != value
        ]
        if used:
            raise Refusal(400, f"this server does not have {', '.join(used)}.")
        tokens = text_tokens(body["prompt"], "prompt")
        check_tokens(tokens, self._model.vocab_size, "prompt")
        params = body.get("sampling_params") or {}
        count = int(body.get("num_samples", 1))
        stop_texts, rows = self._sample_rows(name, body, tokens, params, count)
        weights = SavedWeights()
        if sampler.path is not None:
            saved = self._found(sampler.path)
            folder = self._saved.folder(sampler.path) / ADAPTER_FOLDER
            weights = SavedWeights(str(folder), saved.created)
        scored = None
        if body.get("prompt_logprobs") and len(tokens) > 1:
            scored = TokenRows([tokens[:-1]], [tokens[1:]])
        last = body.get("prompt_logprobs_last_n")

        def make(outcome: CallOutcome, scores: list[float] | None) -> bytes:
            if body.get("prompt_logprobs"):
                scores = scores or []
                if last is not None:
                    # Only the last ones are wanted.
                    left_out = len(scores) - int(last)
                    scores = [float("nan")] * left_out + scores[left_out:]
            return sample_response(self._stopped(outcome, stop_texts), scores)

        def job(promise: Promise) -> QueuedSamples:
            return QueuedSamples(promise, weights, rows, scored, make)

        reply = self._numbered(sampler, body.get("seq_id"), job)
        assert isinstance(reply.body, dict)
        ids = [f"{reply.body['request_id']}:{index}" for index in range(count)]
        return HttpReply(reply.body | {"sample_sequence_ids": ids})

    def _sample_rows(
        self,
        sampler: str,
        body: Mapping[str, Any],
        tokens: list[int],
        params: Mapping[str, Any],
        count: int,
    ) -> tuple[list[str], PromptRows]:
        """Return texts that end a response, and the prompts and options for the engine."""
        room = self._model.max_tokens - len(tokens)
        given = params.get("max_tokens")
        max_tokens = room if given is None else int(given)
        if not 1 <= count <= 1024:
            raise Refusal(400, f"num_samples={count}: from 1 to 1024.")
        if not 1 <= max_tokens <= room:
            raise Refusal(
                400,
                f"a prompt of {len(tokens)} tokens with max_tokens={max_tokens} does not fit the "
                f"{self._model.max_tokens} tokens of this server. Shorten the prompt, or lower max_tokens.",
            )
        temperature = float(params.get("temperature", 1.0))
        top_p = float(params.get("top_p", 1.0))
        if temperature < 0 or not 0 < top_p <= 1:
            raise Refusal(400, "temperature is 0 or more, top_p above 0 and at most 1.")
        texts, stop_tokens = _stops(params.get("stop"), self._tokenizer)
        # An empty list disables the end of sequence as well.
        ignores_eos = params.get("stop") == []
        seed = params.get("seed")
        number = int(body.get("seq_id") or 0)
        # Seeds of a request depend on nothing that happens between the client's
        # requests.
        purpose = sampler.partition(":")[2] if seed is None else "client"
        base = self._seed if seed is None else int(seed) % 2**63
        step = number if seed is None else 0
        return texts, PromptRows(
            prompts=[tokens] * count,
            seeds=[sample_seed(base, step, index, purpose) for index in range(count)],
            max_tokens=[max_tokens] * count,
            temperatures=[temperature] * count,
            top_ps=[top_p] * count,
            top_ks=[max(0, int(params.get("top_k", -1)))] * count,
            stop_tokens=[stop_tokens] * count,
            ignores_eos=[ignores_eos] * count,
        )

    def _stopped(self, outcome: CallOutcome, texts: list[str]) -> CallOutcome:
        """Cut responses after the first of these texts. Engines know stop tokens only."""
        if not texts:
            return outcome
        lengths = [
            _length_until(self._tokenizer, tokens, texts) for tokens in outcome.tokens
        ]
        rows = zip(
            outcome.tokens, outcome.log_probs, outcome.stopped, lengths, strict=True
        )
        cut = [
            (tokens[:end], log_probs[:end], stopped or end is not None)
            for tokens, log_probs, stopped, end in rows
        ]
        return CallOutcome(
            tokens=[row[0] for row in cut],
            log_probs=[row[1] for row in cut],
            stopped=[row[2] for row in cut],
        )

    # --- promises ---------------------------------------------------------------------

    def _numbered(
        self,
        owner: TrainedModel | Sampler,
        number: int | None,
        make: Callable[..., QueuedRequest | QueuedSamples],
        *arguments: Any,
    ) -> HttpReply:
        """Put a job into the queue, unless the same request has done so before. Return the promise's id."""
        with self._lock:
            known = None if number is None else owner.answered.get(number)
            if known is not None:
                return HttpReply({"request_id": known.id})
            promise = self._promises.add()
            if number is not None:
                owner.answered[number] = promise
                # The client sends a request again only while it waits for the answer.
                while len(owner.answered) > 4096:
                    del owner.answered[next(iter(owner.answered))]
            self._queue.put(make(promise, *arguments))
        return HttpReply({"request_id": promise.id})

    def _retrieve(self, body: dict[str, Any]) -> HttpReply:
        promise = self._promises.find(body["request_id"])
        if promise is None:
            raise Refusal(410, "the result is unknown, or was forgotten after an hour.")
        if not promise.wait(POLL_SECONDS):
            body = {
                "type": "try_again",
                "request_id": promise.id,
                "queue_state": "active",
            }
            return HttpReply(body, 408)
        if promise.error:
            return HttpReply({"error": promise.error, "category": "user"})
        return HttpReply(promise.result)

    def _cancel(self, body: dict[str, Any]) -> HttpReply:
        if (promise := self._promises.find(body["request_id"])) is not None:
            promise.is_cancelled = True
        return HttpReply({})

    # --- resources --------------------------------------------------------------------

    def _resource(self, method: str, path: list[str], data: bytes) -> HttpReply:
        match method, path:
            case "GET", ["healthz"]:
                return HttpReply({"status": "ok"})
            case "GET", ["get_server_capabilities"]:
                served = {
                    "model_name": self._model.name,
                    "max_context_length": self._model.max_tokens,
                    "trainable": True,
                    "sampleable": True,
                }
                return HttpReply({"supported_models": [served]})
            case "GET", ["samplers", name]:
                sampler = self._sampler(name)
                path_text = None if sampler.path is None else str(sampler.path)
                return HttpReply(
                    {
                        "sampler_id": name,
                        "base_model": self._model.name,
                        "model_path": path_text,
                    }
                )
            case "POST", ["sessions", name, "finish"]:
                self._session(name).is_over = True
                return HttpReply({})
            case "GET", ["training_runs", name] if NAME.fullmatch(name):
                return self._training_run(name)
            case "GET", ["training_runs", name, "checkpoints"] if NAME.fullmatch(name):
                return HttpReply({"checkpoints": self._saved.describe(name)})
            case "DELETE", ["training_runs", name, "checkpoints", kind, file]:
                path_to_delete = SavedPath.parse(f"tinker://{name}/{kind}/{file}")
                self._found(path_to_delete)
                self._saved.delete(path_to_delete)
                return HttpReply({})
        raise Refusal(404, f"this server does not have {method} {'/'.join(path)}.")

    def _training_run(self, name: str) -> HttpReply:
        with self._lock:
            model = self._models.get(name)
        newest = self._saved.newest(name)
        if model is None and newest is None:
            raise Refusal(404, f"training run {name!r:.80} is unknown.")
        metadata = model.metadata if model is not None else None
        if metadata is None and newest is not None:
            metadata = newest.model_metadata
        described = self._saved.describe(name)
        of_kind = {
            kind: [entry for entry in described if entry["checkpoint_type"] == kind]
            for kind in ("training", "sampler")
        }
        return HttpReply(
            {
                "training_run_id": name,
                "base_model": self._model.name,
                "model_owner": "megaverl",
                "is_lora": True,
                "lora_rank": self._model.rank,
                "last_request_time": _now(),
                "last_checkpoint": of_kind["training"][-1]
                if of_kind["training"]
                else None,
                "last_sampler_checkpoint": of_kind["sampler"][-1]
                if of_kind["sampler"]
                else None,
                "user_metadata": metadata,
            }
        )


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _checkpoint_name(body: Mapping[str, Any]) -> str:
    name = body.get("path")
    if not isinstance(name, str):
        raise RequestFailed("a checkpoint needs a name.")
    return name


def _stops(stop: Any, tokenizer: Tokenizer) -> tuple[list[str], list[int]]:
    """Return texts and tokens that end a response, besides the end of sequence."""
    given = [stop] if isinstance(stop, str) else list(stop or ())
    texts = [entry for entry in given if isinstance(entry, str)]
    tokens = [int(entry) for entry in given if not isinstance(entry, str)]
    # Engines stop at a text that is a single token, such as <|im_end|>.
    single = [encoded for text in texts if len(encoded := tokenizer.encode(text)) == 1]
    return texts, tokens + [token for [token] in single]


def _length_until(
    tokenizer: Tokenizer, tokens: list[int], texts: list[str]
) -> int | None:
    """Return the number of tokens up to the end of the first of these texts, or None if none of them appears."""

    def has_text(length: int) -> bool:
        text = tokenizer.decode(tokens[:length], skip_special_tokens=False)
        return any(stop in text for stop in texts)

    if not has_text(len(tokens)):
        return None
    return next(length for length in range(1, len(tokens) + 1) if has_text(length))


def saved_checkpoints(run_dir: Path) -> SavedCheckpoints:
    """Return the checkpoints in a run's folder."""
    return SavedCheckpoints(run_dir / "tinker")
