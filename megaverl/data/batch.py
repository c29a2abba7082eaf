"""`RolloutBatch`: all data that flows from the rollout to the update, one row per sample."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch
from torch import Tensor

from megaverl.data.batch_conversion import own_names
from megaverl.data.batch_fields import FIELDS, REQUIRED, Field, field_of
from megaverl.data.routed_experts import experts_column
from megaverl.distributed.ragged import beside
from megaverl.errors import DataError

if TYPE_CHECKING:
    from megaverl.data.held_rows import HeldRows
    from megaverl.rollout.engine import Generation


class MissingField(DataError, AttributeError):
    """Raised for a tensor that a batch does not hold (yet)."""


class RolloutBatch:
    """Tensors by name, with samples as the first dimension, and Python columns with one entry per sample.

    `batch_fields.FIELDS` declares the tensors. Dimensions: B samples, S the longest
    prompt, R the longest response; prompts and responses are right-padded. Batches are
    immutable: every method returns a new one that shares unchanged tensors. A tensor is
    read as an attribute (`batch.values`).

    Tokens, lengths, masks and rewards of a run are on the host. Model outputs per token
    (log-probs, values) and everything derived from them stay on the device that
    computed them.
    """

    input_ids: Tensor  # [B, S] int64
    prompt_lengths: Tensor  # [B] int64
    generated_ids: Tensor  # [B, R] int64
    response_lengths: Tensor  # [B] int64
    response_mask: Tensor  # [B, R] bool
    rollout_log_probs: Tensor  # this and what follows [B, R] float32, up to rewards
    old_log_probs: Tensor
    ref_log_probs: Tensor
    entropies: Tensor
    values: Tensor
    last_values: Tensor  # [B] float32
    advantages: Tensor  # [B, R] float32 again
    returns: Tensor
    token_rewards: Tensor
    turn_ids: Tensor  # [B, R] int64
    turn_rewards: Tensor  # [B, R] float32
    rewards: Tensor  # [B] float32
    group_ids: Tensor  # [B] int64
    agent_ids: Tensor
    episode_ids: Tensor
    margins: Tensor  # [B] float32

    __slots__ = ("columns", "held", "tensors")
    tensors: dict[str, Tensor]
    columns: dict[str, list[Any]]
    # The rows of the step's batch that this rank holds; None if it holds all of them.
    held: HeldRows | None

    def __init__(
        self,
        tensors: Mapping[str, Tensor] | None = None,
        columns: Mapping[str, Sequence[Any]] | None = None,
        *,
        generated_includes_prompt: bool | None = None,
        held: HeldRows | None = None,
        **named: Tensor,
    ) -> None:
        """Check every tensor against the schema. Dtypes are converted between floats and between integers.

        A missing `response_lengths` is derived from `response_mask`, up to its last
        token.

        Args:
            tensors: by the names of the schema.
            columns: Python columns.
            generated_includes_prompt: for tensors given by keyword. True: each row of `generated_ids` is its prompt
                followed by its response, and the prompt is removed there and in every other tensor of that width.
                False: rows are responses, whatever they begin with. None: rows are responses, and it is an error if
                every row begins with its own prompt.
            held: the samples of a step's batch in this batch, if this rank does not hold all of them.
            named: tensors by keyword, also under the names of other trainers (`batch_conversion.NAMES`):
                `attention_mask` of prompts padded on either side, `generated_mask`, `logprobs`.

        Raises:
            DataError: a required tensor is missing; a name is unknown; a dtype, shape or column length is wrong; a
                length exceeds its row; a mask exceeds its response; or responses contradict
                `generated_includes_prompt`.
        """
        # Keywords may have other trainers' names. A mapping has the schema's names
        # already.
        tensors = {**(tensors or {}), **named}
        if named:
            tensors = own_names(tensors, generated_includes_prompt)
        missing = [name for name in REQUIRED if name not in tensors]
        if missing:
            raise DataError(
                f"a batch needs {', '.join(REQUIRED)}; missing: {', '.join(missing)}"
            )
        sizes = _sizes(tensors)
        self.tensors = {
            name: _checked(name, tensor, sizes) for name, tensor in tensors.items()
        }
        if "response_lengths" not in self.tensors:
            self.tensors["response_lengths"] = _lengths_of(self.response_mask)
        self.columns = {name: list(column) for name, column in (columns or {}).items()}
        self.held = held
        for name, column in self.columns.items():
            if len(column) != len(self):
                raise DataError(
                    f"column '{name}' has {len(column)} entries for a batch of {len(self)} samples"
                )
        _check_lengths("prompt_lengths", self.prompt_lengths, sizes["S"])
        _check_lengths("response_lengths", self.response_lengths, sizes["R"])
        # A token that trains must exist.
        beyond = (_lengths_of(self.response_mask) > self.response_lengths).nonzero()
        if len(beyond):
            raise DataError(
                f"'response_mask' of sample {int(beyond[0, 0])} goes beyond its response_lengths"
            )

    @classmethod
    def from_generations(
        cls,
        prompts: Sequence[Sequence[int]],
        generations: Sequence[Generation],
        *,
        group_ids: Sequence[int] | None = None,
        columns: Mapping[str, Sequence[Any]] | None = None,
        pad_id: int = 0,
    ) -> RolloutBatch:
        """Return a batch of an engine's inputs and outputs, sample by sample.

        Args:
            prompts: token ids, one list per sample. A prompt with four responses is listed four times.
            generations: one per prompt, with `token_ids`, `log_probs` (one per token) and `finish_reason`.
            group_ids: index of the prompt per sample. None: the samples' own indices.
            columns: entries per sample (text, reference, ...). `finish_reason`, and experts that the engine reports,
                are added.
            pad_id: token that pads rows.

        Raises:
            DataError: counts differ, or a generation has another number of log-probs than tokens.
        """
        if len(prompts) != len(generations):
            raise DataError(
                f"{len(prompts)} prompts, but {len(generations)} generations"
            )
        for i, generation in enumerate(generations):
            if len(generation.token_ids) != len(generation.log_probs):
                raise DataError(
                    f"generation {i} has {len(generation.token_ids)} tokens, but {len(generation.log_probs)} log-probs"
                )
        responses = [generation.token_ids for generation in generations]
        lengths = torch.tensor(
            [len(response) for response in responses], dtype=torch.int64
        )
        generated_ids = _rows(responses, torch.int64, pad_id)
        # [B, S] and [B, R], right-padded. Lengths say where rows end.
        tensors = {
            "input_ids": _rows(prompts, torch.int64, pad_id),
            "prompt_lengths": torch.tensor(
                [len(prompt) for prompt in prompts], dtype=torch.int64
            ),
            "generated_ids": generated_ids,
            "response_lengths": lengths,
            "response_mask": torch.arange(generated_ids.shape[1])
            < lengths.unsqueeze(1),
            "rollout_log_probs": _rows(
                [generation.log_probs for generation in generations], torch.float32, 0.0
            ),
            "group_ids": torch.tensor(
                group_ids if group_ids is not None else range(len(prompts)),
                dtype=torch.int64,
            ),
        }
        reasons = [generation.finish_reason for generation in generations]
        return cls(
            tensors,
            {
                **(columns or {}),
                "finish_reason": reasons,
                **experts_column(generations),
            },
        )

    def __len__(self) -> int:
        return len(self.tensors["input_ids"])

    def __getattr__(self, name: str) -> Tensor:
        """Return a tensor by its name."""
        # Only called for names that are no ordinary attribute: the tensors.
        if not name.startswith("_") and name in FIELDS:
            return self[name]
        raise AttributeError(
            f"RolloutBatch has no attribute '{name}'; this one holds {', '.join(sorted(self.tensors))}"
        )

    @property
    def attention_mask(self) -> Tensor:
        """Mask of the prompt's tokens without padding, [B, S] bool."""
        places = torch.arange(self.input_ids.shape[1], device=self.input_ids.device)
        return places < self.prompt_lengths.unsqueeze(1)

    @property
    def logprobs(self) -> Tensor:
        """Log-probs [B, R] of the actor at the start of the update, or the engine's if those are not known yet."""
        return self["old_log_probs" if "old_log_probs" in self else "rollout_log_probs"]

    @overload
    def __getitem__(self, name: str) -> Tensor: ...

    @overload
    def __getitem__(
        self, name: int | slice | Sequence[int] | Tensor
    ) -> RolloutBatch: ...

    def __getitem__(
        self, name: str | int | slice | Sequence[int] | Tensor
    ) -> Tensor | RolloutBatch:
        """Return a tensor by its name, or samples by index, slice, list or boolean mask (see `select`)."""
        if not isinstance(name, str):
            # An index by a mask selects the marked samples, as in torch.
            if isinstance(name, Tensor) and name.dtype == torch.bool:
                name = name.nonzero().flatten()
            return self.select([name] if isinstance(name, int) else name)
        if name not in self.tensors:
            # Raises an error if the schema has no such field at all.
            field_of(name)
            raise MissingField(
                f"this batch does not hold '{name}' yet; it holds {', '.join(sorted(self.tensors))}"
            )
        return self.tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __repr__(self) -> str:
        sizes = f"B={len(self)}, S={self.input_ids.shape[1]}, R={self.generated_ids.shape[1]}"
        return f"RolloutBatch({sizes}; {', '.join(self.tensors)}; columns: {', '.join(self.columns) or 'none'})"

    @property
    def response_shape(self) -> tuple[int, int]:
        """Shape (B, R) of every per-response-token tensor."""
        return self.generated_ids.shape[0], self.generated_ids.shape[1]

    @property
    def sequence_lengths(self) -> Tensor:
        """Tokens of prompt and response together, [B] int64, which batching balances."""
        return self.prompt_lengths + self.response_lengths

    def with_(self, **tensors: Tensor) -> RolloutBatch:
        """Return this batch with tensors added or replaced.

        Raises:
            DataError: names a tensor that does not match the schema.
        """
        return RolloutBatch({**self.tensors, **tensors}, self.columns, held=self.held)

    def with_columns(self, **columns: Sequence[Any]) -> RolloutBatch:
        """Return this batch with Python columns added or replaced."""
        return RolloutBatch(self.tensors, {**self.columns, **columns}, held=self.held)

    def select(self, indices: Sequence[int] | Tensor | slice) -> RolloutBatch:
        """Return the samples at these indices, in this order; may be empty. Widths S and R stay.

        Raises:
            DataError: an index is outside the batch.
        """
        places = (
            range(*indices.indices(len(self)))
            if isinstance(indices, slice)
            else indices
        )
        rows = [int(i) for i in places]
        outside = [i for i in rows if not -len(self) <= i < len(self)]
        if outside:
            raise DataError(f"sample {outside[0]} asked for in a batch of {len(self)}")
        index = torch.tensor(rows, dtype=torch.int64)
        return RolloutBatch(
            {
                # Tensors of one batch may be on several devices.
                name: tensor[beside(tensor, index)]
                for name, tensor in self.tensors.items()
            },
            {name: [column[i] for i in rows] for name, column in self.columns.items()},
        )

    @staticmethod
    def concat(batches: Sequence[RolloutBatch]) -> RolloutBatch:
        """Return the samples of several batches one after the other, padded to the widest.

        Raises:
            DataError: there are no batches, or they hold different tensors or columns.
        """
        if not batches:
            raise DataError("there are no batches to put together")
        first = batches[0]
        for i, compared in enumerate(batches):
            if (different := compared.tensors.keys() ^ first.tensors.keys()) or (
                different := compared.columns.keys() ^ first.columns.keys()
            ):
                raise DataError(
                    f"batch 0 and batch {i} differ in what they hold: {', '.join(sorted(different))}"
                )
        prompt = max(batch.input_ids.shape[1] for batch in batches)
        response = max(batch.generated_ids.shape[1] for batch in batches)
        # Widths may differ between batches, so all are padded to the widest.
        wide = [batch.pad_to(prompt=prompt, response=response) for batch in batches]
        return RolloutBatch(
            {
                name: torch.cat([batch.tensors[name] for batch in wide])
                for name in first.tensors
            },
            {
                name: [entry for batch in batches for entry in batch.columns[name]]
                for name in first.columns
            },
        )

    def pad_to(
        self,
        *,
        samples: int | None = None,
        prompt: int | None = None,
        response: int | None = None,
    ) -> RolloutBatch:
        """Pad to this many rows, prompt tokens or response tokens. None leaves a dimension unchanged.

        A padding row has lengths 0 and an empty response mask, so it has no weight in
        any loss. Its column entries are None.

        Raises:
            DataError: the batch is already larger.
        """
        now = {
            "B": len(self),
            "S": self.input_ids.shape[1],
            "R": self.generated_ids.shape[1],
        }
        requested = {"B": samples, "S": prompt, "R": response}
        target = {
            axis: now[axis] if size is None else size
            for axis, size in requested.items()
        }
        if any(target[axis] < now[axis] for axis in now):
            raise DataError(f"a batch of {now} cannot be padded to {target}")
        padding: list[Any] = [None] * (target["B"] - now["B"])
        columns = {name: column + padding for name, column in self.columns.items()}
        return RolloutBatch(self._resized(target), columns)

    def trim(self) -> RolloutBatch:
        """Return this batch with S and R cut to its longest prompt and response."""
        if len(self) == 0:
            return RolloutBatch(self._resized({"B": 0, "S": 0, "R": 0}), self.columns)
        longest = {
            "S": int(self.prompt_lengths.max()),
            "R": int(self.response_lengths.max()),
        }
        return RolloutBatch(self._resized({"B": len(self), **longest}), self.columns)

    def to(self, device: torch.device | str) -> RolloutBatch:
        """Return this batch with all tensors on `device`."""
        return RolloutBatch(
            {name: tensor.to(device) for name, tensor in self.tensors.items()},
            self.columns,
        )

    def joined(self, *, multiple_of: int = 1) -> Tensor:
        """Return prompt and response of each sample as one sequence, padded with zeros, [B, s] int64.

        Args:
            multiple_of: s is a multiple of it (the tensor-parallel size under sequence parallelism).

        Raises:
            DataError: a response has no prompt, so nothing predicts its first token.
        """
        orphans = ((self.prompt_lengths == 0) & (self.response_lengths > 0)).nonzero()
        if len(orphans):
            raise DataError(
                f"sample {int(orphans[0, 0])} has a response but an empty prompt: nothing predicts it"
            )
        longest = int(self.sequence_lengths.max()) if len(self) else 0
        # At least one column, so that a model can read a batch of padding rows only.
        width = -(-max(longest, 1) // multiple_of) * multiple_of
        starts = self.prompt_lengths.unsqueeze(1)
        tokens = torch.arange(self.generated_ids.shape[1], device=starts.device)
        present = tokens < self.response_lengths.unsqueeze(1)
        columns = torch.arange(self.input_ids.shape[1], device=starts.device)
        prompt = torch.where(columns < starts, self.input_ids, 0)
        token_ids = self.input_ids.new_zeros(len(self), width)
        kept = min(width, prompt.shape[1])
        token_ids[:, :kept] = prompt[:, :kept]
        # Responses follow their prompts. Padding goes to column 0, with a value of
        # zero.
        places = torch.where(present, starts + tokens, 0)
        return token_ids.scatter_add(
            1, places, torch.where(present, self.generated_ids, 0)
        )

    def _resized(self, sizes: Mapping[str, int]) -> dict[str, Tensor]:
        """Return all tensors cut or padded to these sizes."""
        resized = {}
        for name, tensor in self.tensors.items():
            field = field_of(name)
            shape = [sizes[axis] for axis in "B" + field.axes]
            if list(tensor.shape) == shape:
                resized[name] = tensor
                continue
            padded = tensor.new_full(shape, field.fill)
            kept = tuple(
                slice(0, min(old, new))
                for old, new in zip(tensor.shape, shape, strict=True)
            )
            padded[kept] = tensor[kept]
            resized[name] = padded
        return resized


def scatter_rows(
    num_samples: int, width: int, parts: Sequence[tuple[Sequence[int], Tensor]]
) -> Tensor:
    """Assemble results of micro-batches in batch order.

    Args:
        num_samples, width: B and R of the whole batch.
        parts: (indices of the samples, `[>= len(indices), r]`) with r <= width. Rows beyond the indices are padding and
            are dropped.

    Returns:
        `[num_samples, width]`, 0 where no part has a value.

    Raises:
        DataError: there are no parts, or a part is too wide or too short.
    """
    if not parts:
        raise DataError("there are no micro-batch results to put together")
    result = parts[0][1].new_zeros(num_samples, width)
    # Every sample is in one part, so nothing is added up.
    for indices, rows in parts:
        if rows.shape[1] > width or len(rows) < len(indices):
            raise DataError(
                f"result {list(rows.shape)} of {len(indices)} samples does not fit a width of {width}"
            )
        index = torch.tensor(list(indices), dtype=torch.int64, device=rows.device)
        result[index, : rows.shape[1]] = rows[: len(indices)]
    return result


def answer_rows(batch: RolloutBatch) -> Tensor:
    """Return for each sample the row in which its episode ends, [B] int64.

    That is the last row of the episode with the same agent. If an episode has one
    conversation, it is the sample itself.
    """
    rows = torch.arange(len(batch))
    if "episode_ids" not in batch:
        return rows
    agents = batch.agent_ids if "agent_ids" in batch else torch.zeros_like(rows)
    _, number = torch.stack([batch.episode_ids, agents], dim=1).unique(
        dim=0, return_inverse=True
    )
    # The largest row of each episode and agent, given to all of its rows.
    return torch.zeros_like(rows).scatter_reduce(0, number, rows, "amax")[number]


def _sizes(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the sizes B, S and R of required tensors."""
    for name in ("input_ids", "generated_ids"):
        if tensors[name].dim() != 2:
            raise DataError(
                f"'{name}' must have two dimensions, found shape {list(tensors[name].shape)}"
            )
    batch, prompt = tensors["input_ids"].shape
    return {"B": batch, "S": prompt, "R": tensors["generated_ids"].shape[1]}


def _checked(name: str, tensor: Tensor, sizes: Mapping[str, int]) -> Tensor:
    """Return a tensor in its declared dtype, with its shape checked."""
    field = field_of(name)
    expected = [sizes[axis] for axis in "B" + field.axes]
    if list(tensor.shape) != expected:
        meaning = ", ".join(
            {"B": "samples", "S": "prompt", "R": "response"}[axis]
            for axis in "B" + field.axes
        )
        raise DataError(
            f"'{name}' ({field.meaning}) has shape {list(tensor.shape)}; expected {expected} = [{meaning}]"
        )
    if _sort_of(tensor.dtype) != _sort_of(field.dtype):
        raise DataError(
            f"'{name}' ({field.meaning}) is {tensor.dtype}; expected {field.dtype}"
        )
    return tensor.to(field.dtype)


def _sort_of(dtype: torch.dtype) -> str:
    """Return the kind of a dtype: "bool", "float" or "integer"."""
    if dtype == torch.bool:
        return "bool"
    return "float" if dtype.is_floating_point else "integer"


def _lengths_of(mask: Tensor) -> Tensor:
    """Return the length of each row up to its last marked token."""
    if not mask.shape[1]:
        # amax() refuses an empty axis.
        return mask.new_zeros(len(mask), dtype=torch.int64)
    after = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return torch.where(mask, after, 0).amax(dim=1)


def _check_lengths(name: str, lengths: Tensor, width: int) -> None:
    """Raise DataError if a length is negative or exceeds the row."""
    wrong = ((lengths < 0) | (lengths > width)).nonzero()
    if len(wrong):
        sample = int(wrong[0, 0])
        raise DataError(
            f"'{name}' of sample {sample} is {int(lengths[sample])}; expected 0 to {width}"
        )


def _rows(
    lists: Sequence[Sequence[Any]], dtype: torch.dtype, fill: int | float
) -> Tensor:
    """Return lists as rows of one tensor, padded on the right."""
    lengths = torch.tensor([len(row) for row in lists], dtype=torch.int64)
    width = int(lengths.max()) if len(lists) else 0
    rows = torch.full((len(lists), width), fill, dtype=dtype)
    kind = np.float64 if dtype.is_floating_point else np.int64
    # One conversion of all values is much faster than one tensor per row.
    values = np.fromiter(
        itertools.chain.from_iterable(lists), dtype=kind, count=int(lengths.sum())
    )
    # Filled row by row, in the order of the values.
    rows[torch.arange(width) < lengths.unsqueeze(1)] = torch.from_numpy(values).to(
        dtype
    )
    return rows


__all__ = ["Field", "MissingField", "RolloutBatch", "answer_rows", "scatter_rows"]
