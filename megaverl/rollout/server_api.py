"""HTTP clients of inference servers: vLLM's and SGLang's own.

Requests and responses are token ids and log-probs, so no text is tokenised on the way.
For updates, a client also lets a server reload weights from a folder, names a version
of the weights, and asks for the log-probs of given tokens.
"""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from ipaddress import ip_address
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from megaverl.errors import RolloutError
from megaverl.outside import read_json
from megaverl.rollout.engine import Generation, PromptScore, SamplingOptions
from megaverl.sharding.box_fingerprints import join_fingerprints
from megaverl.sharding.model_spec import ModelSpec

logger = logging.getLogger(__name__)

SHOWN = 400  # characters of a server's message that an error quotes
INFO_SECONDS = 120.0
# Beyond the limit of a transfer, for a worker that reports a failure.
LINK_GRACE_SECONDS = 30.0
# Method of vLLM's workers that receives weights shard to shard, and the extension class
# that has it, which is the value of --worker-extension-cls.
RECEIVE, RECEIVER = "megaverl_receive", "megaverl.workers.vllm_receiver.ShardReceiver"
# Methods of the same class for versions that a shared folder has as changes only.
PREPARE, APPLY = "megaverl_prepare_changes", "megaverl_apply_changes"


class ServerLost(RolloutError):
    """Raised if a server does not answer, answers too late, or reports an internal error.

    Another server may succeed.
    """


class ServerRefused(RolloutError):
    """Raised if a run cannot use a server, or the server refuses a request. Retrying does not help."""


@dataclass(frozen=True)
class ExpectedModel:
    """Requirements on a server.

    Attributes:
        spec: the run's model.
        max_model_len: most tokens of prompt and response together.
        takes_images: whether prompts may have images.
    """

    spec: ModelSpec
    max_model_len: int
    takes_images: bool = False


class InferenceServer(ABC):
    """Client of one server.

    Every method raises ServerLost or ServerRefused, with the URL in the message.

    Args:
        url: root of the server.
        token: sent as a bearer token.
        timeout: seconds until a short request must be answered.
        generating, loading: seconds until a response must be generated, or weights loaded.

    Attributes:
        applies_changes: whether the server can apply versions of which a folder has the changes only.
    """

    applies_changes: bool = False
    # Command that starts a suitable server, for errors about one that was started
    # differently.
    start_with: ClassVar[str]

    def __init__(
        self,
        url: str,
        token: str | None,
        *,
        timeout: float = 10.0,
        generating: float,
        loading: float,
    ) -> None:
        self.url, self._token = url.rstrip("/"), token
        self._timeout, self._generating, self._loading = timeout, generating, loading

    def healthy(self) -> None:
        """Check that the server answers."""
        self.ask("GET", "/health")

    @abstractmethod
    def problems(self, expected: ExpectedModel) -> list[str]:
        """List the reasons why this run cannot use the server, as sentences."""

    @abstractmethod
    def weight_version(self) -> str:
        """Return the name of the server's weights."""

    @abstractmethod
    def name_weights(self, version: str) -> None:
        """Give the server's weights a name."""

    @abstractmethod
    def load(self, folder: str) -> None:
        """Let the server reload all weights from a Hugging Face folder that it can read, and discard its caches."""

    def prepare_changes(self, folder: str) -> None:
        """Find out whether the server can apply changes to the weights that it has read from this folder.

        Sets `applies_changes`.
        """
        self.applies_changes = False

    def apply_changes(
        self, folders: Sequence[str], *, check: bool
    ) -> tuple[int, dict[str, int]]:
        """Let the server apply the changes of these folders, in order, and discard its caches.

        Args:
            check: also return fingerprints.

        Returns:
            Bytes that its workers have read, and the fingerprints of its weights; empty unless `check`.
        """
        raise ServerRefused(f"{self.url}: takes whole weights only.")

    @abstractmethod
    def log_probs(self, tokens: Sequence[int]) -> list[float]:
        """Return the log-prob of each token after the first, given the tokens before it, at temperature 1."""

    @abstractmethod
    def score_prompt(self, tokens: Sequence[int]) -> PromptScore:
        """Return the log-probs of a prompt's tokens and the most likely tokens, at temperature 1."""

    @abstractmethod
    def generate(
        self,
        prompt: Sequence[int],
        sampling: SamplingOptions,
        stop_tokens: Sequence[int],
        seed: int,
        features: Mapping[str, Any] | None = None,
    ) -> tuple[Generation, Collection[str]]:
        """Generate a response; also return the names of the weights that generated it.

        Args:
            features: the prompt's images (`vllm_images.image_features`). None: it has none.
        """

    def ask(
        self, method: str, path: str, body: Any = None, *, timeout: float | None = None
    ) -> Any:
        """Send a request and return the answer as JSON, or None if it is empty or not JSON."""
        parts = urlsplit(self.url)
        assert parts.hostname is not None, "the configuration's check has seen it"
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        # One request per connection: servers come and go, and a kept connection might
        # be half closed.
        headers = {"Content-Type": "application/json", "Connection": "close"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        connection = kind(parts.hostname, parts.port, timeout=timeout or self._timeout)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, f"{parts.path}{path}", data, headers)
            response = connection.getresponse()
            status, text = response.status, response.read().decode(errors="replace")
        except (OSError, HTTPException) as error:
            # The other end is gone or late. Another server may answer.
            raise ServerLost(
                f"{self.url}: no answer to {method} {path} ({error or type(error).__name__})."
            ) from error
        finally:
            connection.close()
        self._check(status, f"{method} {path}", text)
        try:
            return read_json(text, not_finite=True) if text else None
        except ValueError:
            return None

    def _check(self, status: int, request: str, text: str) -> None:
        if status == 401:
            wants = (
                "another token"
                if self._token
                else "a token (rollout.servers.token_env)"
            )
            raise ServerRefused(
                f"{self.url}: answers {status} to {request}: it wants {wants}."
            )
        if status in (403, 404, 405):
            raise ServerRefused(
                f"{self.url}: has no {request} (it answers {status} {text[:SHOWN]}). Start it with: {self.start_with}"
            )
        # The server's own failure, or too many requests: another try may succeed.
        if status >= 500 or status == 429:
            raise ServerLost(
                f"{self.url}: answers {status} to {request}: {text[:SHOWN]}"
            )
        if status >= 300:
            raise ServerRefused(
                f"{self.url}: answers {status} to {request}: {text[:SHOWN]}"
            )

    def _taken(self, request: str, take: Any) -> Any:
        """Return `take()`, which reads an answer; raise ServerRefused if the answer lacks a field."""
        try:
            return take()
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise ServerRefused(
                f"{self.url}: its answer to {request} is not what this version of megaverl reads ({error!r}). "
                f"Start it with: {self.start_with}"
            ) from error


class VLLMServer(InferenceServer):
    """vLLM's own server, with its development endpoints (`vllm/entrypoints/rl`, `serve/dev`, `scale_out`)."""

    start_with = "megaverl serve rollout MODEL (with vLLM 0.32 or newer)."
    _takes_images = False

    def problems(self, expected: ExpectedModel) -> list[str]:
        self._takes_images = expected.takes_images
        self.weight_version()
        # A trial request shows that the token is right and that the server takes token
        # ids.
        self.log_probs([0, 0])
        answer = self.server_info()
        config = self._taken(
            "GET /server_info", lambda: answer["vllm_config"]["model_config"]
        )
        problems = _length_problems(config.get("max_model_len"), expected)
        if (mode := config.get("logprobs_mode")) != "processed_logprobs":
            problems.append(
                f"its log-probs are {mode}, and training needs those of the distribution that was drawn from: "
                "--logprobs-mode processed_logprobs"
            )
        if expected.takes_images:
            problems += _image_problems(config.get("multimodal_config") or {})
        parallel = answer["vllm_config"].get("parallel_config") or {}
        self.applies_changes = parallel.get("worker_extension_cls") == RECEIVER
        return problems + _folder_problems(config.get("model"), expected)

    def server_info(self) -> Any:
        """Return the server's configuration.

        vLLM describes the whole machine in the first answer, which takes more than 10 s
        on a busy one.
        """
        return self.ask("GET", "/server_info?config_format=json", timeout=INFO_SECONDS)

    def weight_version(self) -> str:
        answer = self.ask("GET", "/weight_info")
        return str(self._taken("GET /weight_info", lambda: answer["weight_version"]))

    def name_weights(self, version: str) -> None:
        self.ask("POST", "/update_weight_version", {"new_version": version})

    def load(self, folder: str) -> None:
        call = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        self.ask("POST", "/collective_rpc", call, timeout=self._loading)
        # The cache is keyed by tokens, and would mix old and new weights.
        self._forget_cached()

    def prepare_changes(self, folder: str) -> None:
        if not self.applies_changes:
            return
        for worker in self._call_workers(PREPARE, {"folder": folder}):
            if (problem := worker.get("problem")) is not None:
                self.applies_changes = False
                logger.info(
                    "%s: its weights are always read whole: %s", self.url, problem
                )

    def apply_changes(
        self, folders: Sequence[str], *, check: bool
    ) -> tuple[int, dict[str, int]]:
        task = {"folders": list(folders), "check": check}
        answers = self._call_workers(APPLY, {"task": json.dumps(task)})
        for worker in answers:
            if (error := worker.get("error")) is not None:
                raise ServerLost(f"{self.url}: did not apply the changes: {error}")
        self._forget_cached()
        # Workers of a server hold parts of the same weights.
        taken: tuple[int, dict[str, int]] = self._taken(
            "POST /collective_rpc",
            lambda: (
                sum(int(worker["bytes"]) for worker in answers),
                join_fingerprints(worker["fingerprints"] for worker in answers),
            ),
        )
        return taken

    def _call_workers(
        self, method: str, arguments: Mapping[str, Any], grace_seconds: float = 0.0
    ) -> list[dict[str, Any]]:
        """Call a method of `ShardReceiver` on all workers; return the answer of each.

        Args:
            grace_seconds: beyond the limit for loading weights.
        """
        body = {"method": method, "kwargs": dict(arguments)}
        seconds = self._loading + grace_seconds
        answer = self.ask("POST", "/collective_rpc", body, timeout=seconds)
        answers: list[dict[str, Any]] = self._taken(
            "POST /collective_rpc", lambda: list(answer["results"])
        )
        # Checks the form of the answers here, where the error can name the server.
        self._taken(
            "POST /collective_rpc", lambda: [worker.keys() for worker in answers]
        )
        return answers

    def _forget_cached(self) -> None:
        # The encoder's outputs are identified by their images, not by weights.
        if self._takes_images:
            self.ask("POST", "/reset_encoder_cache")
        answer = self.ask("POST", "/reset_prefix_cache")
        if not (answer or {}).get("success"):
            raise ServerLost(
                f"{self.url}: did not reset its prefix cache: somebody else's requests are running."
            )

    def log_probs(self, tokens: Sequence[int]) -> list[float]:
        fields = {
            # One token is generated because a request must have one. Only the prompt's
            # log-probs count.
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
            "detokenize": False,
        }
        answer = self._generate(tokens, fields)

        def take() -> list[float]:
            # The first token has no predecessor, and so no log-prob.
            positions = zip(answer["prompt_logprobs"][1:], tokens[1:], strict=True)
            return [
                float(of_token[str(token)]["logprob"]) for of_token, token in positions
            ]

        log_probs: list[float] = self._taken("prompt_logprobs", take)
        return log_probs

    def score_prompt(self, tokens: Sequence[int]) -> PromptScore:
        fields = {
            # At temperature 0, the generated token is the most likely one.
            "max_tokens": 1,
            "temperature": 0.0,
            "ignore_eos": True,
            "logprobs": 0,
            "prompt_logprobs": 1,
            "detokenize": False,
        }
        answer = self._generate(tokens, fields)

        def take() -> PromptScore:
            log_probs, top_tokens, top_log_probs = [], [], []
            positions = zip(answer["prompt_logprobs"][1:], tokens[1:], strict=True)
            for candidates, token in positions:
                top = max(candidates, key=lambda name: candidates[name]["logprob"])
                log_probs.append(float(candidates[str(token)]["logprob"]))
                top_tokens.append(int(top))
                top_log_probs.append(float(candidates[top]["logprob"]))
            [choice] = answer["choices"]
            top_tokens.append(int(choice["token_ids"][0]))
            top_log_probs.append(float(choice["logprobs"]["content"][0]["logprob"]))
            return PromptScore(log_probs, top_tokens, top_log_probs)

        score: PromptScore = self._taken("prompt_logprobs", take)
        return score

    def generate(
        self,
        prompt: Sequence[int],
        sampling: SamplingOptions,
        stop_tokens: Sequence[int],
        seed: int,
        features: Mapping[str, Any] | None = None,
    ) -> tuple[Generation, Collection[str]]:
        fields = {
            **sampling.extra,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop_token_ids": list(stop_tokens),
            "ignore_eos": sampling.ignore_eos,
            "logprobs": 0,  # only the drawn token's
            "seed": seed,
            "detokenize": False,
        }
        answer = self._generate(prompt, fields, features)

        def take() -> tuple[Generation, Collection[str]]:
            [choice] = answer["choices"]
            log_probs = [
                float(token["logprob"]) for token in choice["logprobs"]["content"]
            ]
            versions = {span["version"] for span in choice["weight_versions"] or ()}
            return Generation(
                list(choice["token_ids"]), log_probs, str(choice["finish_reason"])
            ), versions

        generation, versions = self._taken("a request", take)
        return generation, versions

    def _generate(
        self,
        tokens: Sequence[int],
        sampling: Mapping[str, Any],
        features: Mapping[str, Any] | None = None,
    ) -> Any:
        body = {"token_ids": list(tokens), "sampling_params": sampling}
        if features is not None:
            body["features"] = features
        return self.ask(
            "POST", "/inference/v1/generate", body, timeout=self._generating
        )


class VLLMShardServer(VLLMServer):
    """A vLLM server whose workers receive weights shard to shard (`megaverl.workers.vllm_receiver`)."""

    num_workers: int = 1

    def problems(self, expected: ExpectedModel) -> list[str]:
        problems = super().problems(expected)
        # Answered from the server's memory, so a second request costs nothing.
        answer = self.server_info()
        parallel = self._taken(
            "GET /server_info", lambda: answer["vllm_config"]["parallel_config"]
        )
        self.num_workers = int(
            self._taken("GET /server_info", lambda: parallel["tensor_parallel_size"])
        )
        if parallel.get("worker_extension_cls") != RECEIVER:
            problems.append(
                "its workers take no weights from the actor's ranks. Start it with megaverl serve rollout, or with "
                f"--worker-extension-cls {RECEIVER}, or use rollout.servers.transfer=folder"
            )
        other_sizes = {
            name: parallel.get(f"{name}_parallel_size", 1)
            for name in ("pipeline", "data")
        }
        if split := [
            f"{name}-parallel size {size}"
            for name, size in other_sizes.items()
            if size != 1
        ]:
            problems.append(
                f"it has {' and '.join(split)}, and weights go to tensor-parallel servers only. Start one server for "
                "each replica, or use rollout.servers.transfer=folder"
            )
        return problems

    def receive(self, link: Mapping[str, Any], first_rank: int) -> list[dict[str, Any]]:
        """Let the workers receive one version of the weights; return the answer of each.

        Args:
            link: where they meet the senders (`LinkAddress.to_json`).
            first_rank: number of the first worker in the link.
        """
        task = json.dumps({"link": link, "first_rank": first_rank})
        return self._call_workers(RECEIVE, {"task": task}, LINK_GRACE_SECONDS)

    def forget_cached(self) -> None:
        """Discard what was computed from old weights."""
        self._forget_cached()


# vLLM's SamplingParams -> SGLang's name of the same parameter.
SGLANG_SAMPLING = {
    "min_p": "min_p",
    "min_tokens": "min_new_tokens",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}


class SGLangServer(InferenceServer):
    """SGLang's own server (`python/sglang/srt/entrypoints/http_server.py`)."""

    start_with = (
        "python -m sglang.launch_server --model-path MODEL --enable-deterministic-inference, of an SGLang that has "
        "weight versions (0.5 or newer)."
    )

    def problems(self, expected: ExpectedModel) -> list[str]:
        self.weight_version()
        self.log_probs([0, 0])
        model = self.ask("GET", "/get_model_info")
        server = self.ask("GET", "/get_server_info")
        problems = _folder_problems(
            self._taken("GET /get_model_info", lambda: model["model_path"]), expected
        )
        problems += _length_problems(server.get("context_length"), expected)
        # The answer lies outside the `_taken` check because all versions have these
        # fields.
        if not server.get("enable_deterministic_inference"):
            problems.append(
                "it draws without the seeds that it is given: --enable-deterministic-inference"
            )
        if expected.takes_images:
            problems.append(
                "it processes pictures itself, with other numbers than the trainer. Use rollout.servers.kind=vllm"
            )
        if not model.get("is_generation", True):
            problems.append(
                "it generates nothing: it serves a reward or embedding model"
            )
        return problems

    def weight_version(self) -> str:
        answer = self.ask("GET", "/get_model_info")
        return str(self._taken("GET /get_model_info", lambda: answer["weight_version"]))

    def name_weights(self, version: str) -> None:
        self.ask(
            "POST",
            "/update_weight_version",
            {"new_version": version, "abort_all_requests": False},
        )

    def load(self, folder: str) -> None:
        answer = self.ask(
            "POST",
            "/update_weights_from_disk",
            {"model_path": folder},
            timeout=self._loading,
        )
        if not (answer or {}).get("success"):
            raise ServerLost(
                f"{self.url}: did not read {folder}: {str(answer)[:SHOWN]}"
            )
        self.ask("POST", "/flush_cache")

    def log_probs(self, tokens: Sequence[int]) -> list[float]:
        sampling = {"max_new_tokens": 1, "temperature": 0.0}
        body = {
            "input_ids": list(tokens),
            "sampling_params": sampling,
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answer = self.ask("POST", "/generate", body, timeout=self._generating)
        log_probs: list[float] = self._taken(
            "POST /generate",
            lambda: [
                float(entry[0])
                for entry in answer["meta_info"]["input_token_logprobs"][1:]
            ],
        )
        return log_probs

    def score_prompt(self, tokens: Sequence[int]) -> PromptScore:
        body = {
            "input_ids": list(tokens),
            # At temperature 0, the generated token is the most likely one.
            "sampling_params": {
                "max_new_tokens": 1,
                "temperature": 0.0,
                "ignore_eos": True,
            },
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 1,
        }
        answer = self.ask("POST", "/generate", body, timeout=self._generating)

        def take() -> PromptScore:
            about = answer["meta_info"]
            own = about["input_token_logprobs"][1:]
            # One list of (log-prob, token) pairs per position.
            top = [pairs[0] for pairs in about["input_top_logprobs"][1:]]
            top.append(about["output_token_logprobs"][0])
            if len(own) != len(tokens) - 1 or len(top) != len(tokens):
                raise ValueError(f"{len(own)} log-probs for {len(tokens)} tokens")
            return PromptScore(
                [float(entry[0]) for entry in own],
                [int(entry[1]) for entry in top],
                [float(entry[0]) for entry in top],
            )

        score: PromptScore = self._taken("POST /generate", take)
        return score

    def generate(
        self,
        prompt: Sequence[int],
        sampling: SamplingOptions,
        stop_tokens: Sequence[int],
        seed: int,
        features: Mapping[str, Any] | None = None,
    ) -> tuple[Generation, Collection[str]]:
        assert features is None, "`problems` refuses models that take images"
        sampling_params = {
            **{SGLANG_SAMPLING[name]: value for name, value in sampling.extra.items()},
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            # SGLang has -1 for all tokens.
            "top_k": sampling.top_k or -1,
            "stop_token_ids": list(stop_tokens),
            "ignore_eos": sampling.ignore_eos,
            "sampling_seed": seed,
        }
        body = {
            "input_ids": list(prompt),
            "sampling_params": sampling_params,
            "return_logprob": True,
        }
        answer = self.ask("POST", "/generate", body, timeout=self._generating)

        def take() -> tuple[Generation, Collection[str]]:
            about = answer["meta_info"]
            drawn = about["output_token_logprobs"]
            # SGLang reports (log-prob, token) pairs.
            generation = Generation(
                [int(entry[1]) for entry in drawn],
                [float(entry[0]) for entry in drawn],
                about["finish_reason"]["type"],
            )
            return generation, {str(about["weight_version"])}

        generation, versions = self._taken("POST /generate", take)
        return generation, versions


def _image_problems(config: Mapping[str, Any]) -> list[str]:
    """List the settings of a vLLM server that would change images, from its multimodal configuration."""
    problems = []
    # Versions that do not know the setting never normalise on the device.
    if config.get("mm_device_do_normalize"):
        problems.append(
            "it would normalise pixels that the trainer has normalised: --no-mm-device-do-normalize"
        )
    if config.get("language_model_only"):
        problems.append("it has no vision tower: leave out --language-model-only")
    return problems


def _length_problems(length: Any, expected: ExpectedModel) -> list[str]:
    if not isinstance(length, int) or length >= expected.max_model_len:
        return []
    return [
        f"it takes {length} tokens, and a prompt with its response may have {expected.max_model_len}"
    ]


# Fields that must be equal for the run's weights to fit into the server's model.
SAME = (
    "architecture",
    "vocab_size",
    "num_layers",
    "hidden_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
)


def _folder_problems(folder: Any, expected: ExpectedModel) -> list[str]:
    """Report a server that serves another model, if its folder can be read on this machine too."""
    if not isinstance(folder, str) or not (Path(folder) / "config.json").is_file():
        return []
    served, wanted = ModelSpec.outline(folder), expected.spec
    different = [
        name for name in SAME if getattr(served, name) != getattr(wanted, name)
    ]
    values = ", ".join(
        f"{name} {getattr(served, name)} and not {getattr(wanted, name)}"
        for name in different
    )
    return [f"it serves another model, {folder}: {values}"] if different else []


def url_problem(url: str) -> str:
    """Return the problem with the root URL of a server; empty if there is none."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return f"found {url!r}, which is no URL ({error})."
    # Credentials in a URL would be written to logs.
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or port is None
        or parts.query
        or parts.username
    ):
        return f"found {url!r}; expected a server's root with its port, such as http://10.0.0.5:8000."
    if parts.path.rstrip("/").endswith("/v1"):
        return f"found {url!r}; expected the server's root, without /v1."
    return ""


def is_loopback(url: str) -> bool:
    """Return whether the URL can be reached from this machine only."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
