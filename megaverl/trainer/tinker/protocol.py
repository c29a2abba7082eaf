"""Messages of Tinker's API: reading requests, and writing results.

Rows of tokens and their results are protocol buffers, whose descriptions come with the
client package. Everything else is JSON.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megaverl.algorithms.summed_losses import SUMMED_LOSSES
from megaverl.trainer.tinker.messages import CallOutcome, LossRequest, TokenRows
from megaverl.trainer.tinker.promises import RequestFailed

TARGETS = "target_tokens"


def descriptions() -> Any:
    """Import the client's descriptions of protocol buffers.

    The client is imported only by a server that runs, since no other command needs it.
    """
    from tinker.proto import tinker_public_pb2

    return tinker_public_pb2


class ForwardBackward:
    """A request for log-probs of rows of tokens, and for the gradient of their loss.

    Args:
        data: the encoded message.

    Raises:
        ValueError: the data is no such message.
    """

    def __init__(self, data: bytes) -> None:
        message = descriptions().ForwardBackwardRequest()
        try:
            message.ParseFromString(data)
        except Exception as error:  # protobuf's own class depends on its back end
            raise ValueError(f"it is no ForwardBackwardRequest: {error}") from error
        self.model: str = message.model_id
        self.number: int = message.seq_id
        self.trains = not message.forward_only
        self._message = message

    def loss(self) -> LossRequest:
        """Return the loss.

        Raises:
            RequestFailed: there is no such loss or option.
        """
        name = self._message.loss_fn
        if name not in SUMMED_LOSSES:
            raise RequestFailed(
                f"loss_fn={name!r} is not one of this server. Use {', '.join(SUMMED_LOSSES)}, or "
                "forward_backward_custom."
            )
        given = {
            key: value.number
            for key, value in self._message.loss_fn_config_v2.items()
            if value.HasField("number")
        }
        unknown = (set(self._message.loss_fn_config_v2) | set(given)) - set(
            SUMMED_LOSSES[name].options
        )
        if unknown:
            known = ", ".join(SUMMED_LOSSES[name].options) or "no options"
            raise RequestFailed(
                f"loss_fn_config: {', '.join(sorted(unknown))}: {name} has {known}."
            )
        return LossRequest(name, given)

    def rows(self, vocab_size: int, max_tokens: int) -> TokenRows:
        """Return the rows of tokens.

        Args:
            vocab_size: number of tokens that the model knows.
            max_tokens: length of the longest row that the server takes.

        Raises:
            RequestFailed: a row cannot be trained on. The message names it.
        """
        needed = SUMMED_LOSSES[self.loss().name].inputs
        if not self._message.data:
            raise RequestFailed("the request has no data.")
        tokens: list[list[int]] = []
        targets: list[list[int]] = []
        inputs: dict[str, list[list[float]]] = {name: [] for name in needed}
        for number, datum in enumerate(self._message.data):
            where = f"datum {number}"
            row = _tokens_of(datum.model_input, where)
            check_tokens(row, vocab_size, f"{where}: model_input")
            if len(row) >= max_tokens:
                raise RequestFailed(
                    f"{where} has {len(row)} tokens, and this server takes fewer than {max_tokens}."
                )
            given = datum.loss_fn_inputs
            missing = [name for name in (TARGETS, *needed) if name not in given]
            if missing:
                raise RequestFailed(
                    f"{where} lacks {', '.join(missing)} in loss_fn_inputs, which {self._message.loss_fn} reads."
                )
            row_targets = _values(given[TARGETS], len(row), f"{where}: {TARGETS}")
            check_tokens(row_targets, vocab_size, f"{where}: {TARGETS}")
            tokens.append(row)
            targets.append([int(target) for target in row_targets])
            for name in needed:
                values = _values(given[name], len(row), f"{where}: {name}")
                inputs[name].append([float(value) for value in values])
        return TokenRows(tokens, targets, inputs)


def _tokens_of(chunks: Sequence[Any], where: str) -> list[int]:
    tokens: list[int] = []
    for chunk in chunks:
        if chunk.WhichOneof("chunk") != "encoded_text":
            raise RequestFailed(f"{where}: this server reads text tokens only.")
        tokens += np.frombuffer(chunk.encoded_text.tokens, dtype=np.int32).tolist()
    if not tokens:
        raise RequestFailed(f"{where}: model_input is empty.")
    return tokens


def _values(tensor: Any, length: int, where: str) -> list[float]:
    """Return the values of a tensor with one value for each token.

    Raises:
        RequestFailed: the tensor has another shape or an unknown type.
    """
    proto = descriptions()
    dtypes = {proto.DTYPE_FLOAT32: np.float32, proto.DTYPE_INT64: np.int64}
    if tensor.WhichOneof("encoding") != "dense" or len(tensor.shape) > 1:
        raise RequestFailed(
            f"{where} has several values per token. This server takes one value per token."
        )
    if tensor.dtype not in dtypes:
        raise RequestFailed(f"{where} is neither float32 nor int64.")
    values = np.frombuffer(tensor.dense, dtype=dtypes[tensor.dtype])
    if len(values) != length:
        raise RequestFailed(
            f"{where} has {len(values)} values for {length} tokens of model_input."
        )
    if not np.isfinite(values).all():
        raise RequestFailed(f"{where} holds a value that is not finite.")
    result: list[float] = values.tolist()
    return result


def check_tokens(tokens: Sequence[float], vocab_size: int, where: str) -> None:
    """Refuse tokens that the model does not know.

    Raises:
        RequestFailed: names the first of them.
    """
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise RequestFailed(
                f"{where} holds token {token:g}, but the vocabulary is 0 to {vocab_size - 1}."
            )


def forward_backward_output(outcome: CallOutcome) -> bytes:
    """Return log-probs and metrics as the message ForwardBackwardOutput."""
    proto = descriptions()
    message = proto.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    message.metrics.update(outcome.numbers)
    record = message.loss_fn_outputs.add(
        type_tag="ArrayRecord", num_datums=len(outcome.log_probs)
    )
    lengths = [len(row) for row in outcome.log_probs]
    flat = [value for row in outcome.log_probs for value in row]
    data = np.asarray(flat, dtype=np.float32)
    # Places in bytes at which rows begin, and the end of the last one.
    offsets = np.cumsum([0, *lengths], dtype=np.int64) * data.itemsize
    field = record.fields["logprobs"]
    field.data = data.tobytes()
    field.offsets = offsets.tobytes()
    field.dtype = proto.DTYPE_FLOAT32
    encoded: bytes = message.SerializeToString()
    return encoded


def sample_response(
    outcome: CallOutcome, prompt_log_probs: list[float] | None
) -> bytes:
    """Return responses as the message SampleResponse.

    Args:
        prompt_log_probs: log-prob of each token of the prompt after the first. None: they were not asked for.
    """
    proto = descriptions()
    message = proto.SampleResponse()
    for tokens, log_probs, stopped in zip(
        outcome.tokens, outcome.log_probs, outcome.stopped, strict=True
    ):
        message.sequences.add(
            stop_reason=proto.STOP_REASON_STOP if stopped else proto.STOP_REASON_LENGTH,
            tokens=np.asarray(tokens, dtype=np.int32).tobytes(),
            logprobs=np.asarray(log_probs, dtype=np.float32).tobytes(),
        )
    if prompt_log_probs is not None:
        # The client reads NaN as no log-prob.
        known = np.asarray([math.nan, *prompt_log_probs], dtype=np.float32)
        message.prompt_logprobs = known.tobytes()
    encoded: bytes = message.SerializeToString()
    return encoded


def text_tokens(prompt: Mapping[str, Any], where: str) -> list[int]:
    """Return the tokens of a prompt in JSON.

    Raises:
        RequestFailed: it is empty or not of text tokens only.
    """
    tokens: list[int] = []
    for chunk in prompt.get("chunks", ()):
        if chunk.get("type", "encoded_text") != "encoded_text":
            raise RequestFailed(f"{where}: this server reads text tokens only.")
        tokens += [int(token) for token in chunk["tokens"]]
    if not tokens:
        raise RequestFailed(f"{where} is empty.")
    return tokens
