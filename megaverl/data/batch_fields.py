"""Schema of a RolloutBatch's tensors, and conversions between its forms.

These are tensors under other trainers' names, prompts and responses joined to one sequence, and expert choices.

Expert choices are the experts that an engine used for each token: a byte or two per token, layer and choice.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from megaverl.distributed.shared_item import SharedItem
from megaverl.errors import DataError

if TYPE_CHECKING:
    from megaverl.data.batch import RolloutBatch
    from megaverl.rollout.engine import Generation


class Field(NamedTuple):
    """Declaration of a tensor.

    Attributes:
        dtype: stored dtype.
        axes: dimensions after the batch: "S" prompt, "R" response.
        fill: value of padding.
        meaning: description for messages and documentation.
    """

    dtype: torch.dtype
    axes: str = ""
    fill: int | float | bool = 0
    meaning: str = ""


FIELDS: dict[str, Field] = {
    "input_ids": Field(torch.int64, "S", 0, "prompt tokens, right-padded"),
    "prompt_lengths": Field(torch.int64, "", 0, "tokens in the prompt"),
    "generated_ids": Field(torch.int64, "R", 0, "response tokens, right-padded"),
    "response_lengths": Field(torch.int64, "", 0, "tokens in the response, whoever wrote them"),
    "response_mask": Field(torch.bool, "R", False, "the tokens that train: those that the policy generated"),
    "rollout_log_probs": Field(torch.float32, "R", 0.0, "log-probs that the engine reported"),
    "weight_versions": Field(torch.int64, "R", -1, "version of the weights that each token was generated with"),
    "temperatures": Field(torch.float32, "", 1.0, "temperature at which a sample was drawn; greedy ones count as 1"),
    "top_ks": Field(torch.int64, "", 0, "how many of the likeliest tokens each of its tokens was drawn from; 0: all"),
    "old_log_probs": Field(torch.float32, "R", 0.0, "log-probs of the actor at the start of the update"),
    "ref_log_probs": Field(torch.float32, "R", 0.0, "log-probs of the reference"),
    "entropies": Field(torch.float32, "R", 0.0, "entropy of the actor's distribution, nats"),
    "values": Field(torch.float32, "R", 0.0, "the critic's value before each token"),
    "last_values": Field(torch.float32, "", 0.0, "the value after a response that was cut off"),
    "advantages": Field(torch.float32, "R", 0.0, "credit of each token"),
    "returns": Field(torch.float32, "R", 0.0, "targets of the critic"),
    "token_rewards": Field(torch.float32, "R", 0.0, "reward of each token"),
    "turn_ids": Field(torch.int64, "R", 0, "number of the turn, of the policy's own tokens"),
    "turn_rewards": Field(torch.float32, "R", 0.0, "an environment's reward of a turn, at its last token"),
    "rewards": Field(torch.float32, "", 0.0, "score of each response"),
    "margins": Field(torch.float32, "", 0.0, "how much better the better response of a sample's pair is"),
    "desirable": Field(torch.bool, "", False, "whether more of such responses is wanted (KTO)"),
    "agent_ids": Field(torch.int64, "", 0, "number of the agent whose sample it is, in a game of several"),
    "episode_ids": Field(torch.int64, "", -1, "number of the episode; its conversations share it"),
    "prompt_numbers": Field(torch.int64, "", -1, "the same for equal prompts, where a rank has not all of them"),
    "group_ids": Field(torch.int64, "", -1, "index of the prompt; its responses share it"),
}

REQUIRED = ("input_ids", "prompt_lengths", "generated_ids", "response_mask")


def declare_field(name: str, field: Field) -> None:
    """Add a custom tensor to the schema, so that batches can carry it.

    Raises:
        DataError: the name is taken by another field, or an axis is neither "S" nor "R".
    """
    if FIELDS.get(name, field) != field:
        raise DataError(f"batch field '{name}' is already declared as {FIELDS[name]}; choose another name")
    if not name.isidentifier() or set(field.axes) - set("SR"):
        raise DataError(f"batch field '{name}' must be an identifier with axes out of 'S' and 'R', found {field}")
    FIELDS[name] = field


def field_of(name: str) -> Field:
    """Return the declaration of `name`.

    Raises:
        DataError: there is no such field. Names the closest ones.
    """
    if name not in FIELDS:
        near = difflib.get_close_matches(name, FIELDS, n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise DataError(f"a batch has no field '{name}'{hint} (known: {', '.join(FIELDS)}; or declare_field())")
    return FIELDS[name]


# Name in other trainers -> name here.
NAMES = {"logprobs": "rollout_log_probs", "generated_mask": "response_mask"}


def own_names(tensors: Mapping[str, Tensor], includes_prompt: bool | None = None) -> dict[str, Tensor]:
    """Return tensors under the schema's names.

    `attention_mask` [B, S] becomes `prompt_lengths`, and left-padded prompts are moved to right padding. Without that
    mask, prompts have no padding. Without a mask of the response, every generated token is trained.

    Args:
        includes_prompt: `generated_includes_prompt` of `RolloutBatch`.

    Raises:
        DataError: a mask has another shape or holes, a tensor is given under both names, or `includes_prompt`
            contradicts the tensors.
    """
    renamed = dict(tensors)
    for theirs, ours in NAMES.items():
        if theirs in renamed:
            if ours in renamed:
                raise DataError(f"'{theirs}' and '{ours}' are the same, and both are given. Leave one out.")
            renamed[ours] = renamed.pop(theirs)
    if "input_ids" not in renamed or "generated_ids" not in renamed:
        # The constructor of the batch reports missing fields.
        return renamed
    renamed["response_mask"] = renamed.get("response_mask", torch.ones_like(renamed["generated_ids"])).bool()
    prompts = renamed["input_ids"]
    mask = renamed.pop("attention_mask", None)
    if mask is not None:
        renamed["input_ids"], renamed["prompt_lengths"] = _right_padded(prompts, mask.bool())
    elif "prompt_lengths" not in renamed:
        renamed["prompt_lengths"] = torch.full((len(prompts),), prompts.shape[1], device=prompts.device)
    generated = renamed["generated_ids"]
    is_same_batch = prompts.dim() == generated.dim() == 2 and len(prompts) == len(generated)
    # Tensors of different sizes are reported by the constructor of the batch.
    if includes_prompt is not False and is_same_batch:
        begins = _begins(prompts, renamed)
        if includes_prompt:
            _cut_prompts(renamed, begins)
        elif bool((begins > 0).all()) and len(begins):
            raise DataError(
                f"'generated_ids': all {len(begins)} rows begin with their own prompt, whose tokens would be trained "
                "on. Give responses alone, or generated_includes_prompt=True to have the prompts cut off (False: the "
                "responses do repeat their prompts)."
            )
    return renamed


def _begins(prompts: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return where the response begins in each row of `generated_ids` [B, W], or -1 without a prompt before it.

    What precedes the response is either `prompts` [B, S] as given, padding included, in every row, or each prompt
    without padding.
    """
    generated = tensors["generated_ids"]
    lengths = tensors["prompt_lengths"].long()
    width = prompts.shape[1]
    if generated.shape[1] >= width and torch.equal(generated[:, :width], prompts):
        return torch.full_like(lengths, width)
    shared = min(width, generated.shape[1])
    beyond = torch.arange(width, device=prompts.device) >= lengths.unsqueeze(1)
    same = torch.zeros_like(beyond)
    same[:, :shared] = generated[:, :shared] == tensors["input_ids"][:, :shared]
    return torch.where((same | beyond).all(dim=1), lengths, -1)


def _cut_prompts(tensors: dict[str, Tensor], begins: Tensor) -> None:
    """Remove the prompts from `generated_ids` and from all tensors of the same width. The result is right-padded."""
    without = (begins < 0).nonzero()
    if len(without):
        raise DataError(
            f"generated_includes_prompt=True, but 'generated_ids' of sample {int(without[0, 0])} does not begin with "
            "its prompt. Leave it out where they are responses alone."
        )
    width = tensors["generated_ids"].shape[1]
    places = torch.arange(width - int(begins.min()), device=begins.device) + begins.unsqueeze(1)
    inside = places < width
    for name, tensor in tensors.items():
        if name in FIELDS and FIELDS[name].axes == "R" and tensor.shape[1:] == (width,):
            kept = tensor.gather(1, places.clamp(max=width - 1))
            tensors[name] = torch.where(inside, kept, torch.full_like(kept, FIELDS[name].fill))


def _right_padded(prompts: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return prompts [B, S] with all padding at their ends, zeroed, and their lengths [B]."""
    if mask.shape != prompts.shape:
        raise DataError(f"'attention_mask' has shape {list(mask.shape)}; 'input_ids' has {list(prompts.shape)}")
    lengths = mask.sum(dim=1)
    edges = (mask[:, 1:] != mask[:, :-1]).sum(dim=1)
    padded_twice = (edges > 1).nonzero()
    if len(padded_twice):
        raise DataError(f"'attention_mask' of sample {int(padded_twice[0, 0])} has holes; prompts are one piece")
    first = torch.where(lengths > 0, mask.int().argmax(dim=1), 0)
    columns = torch.arange(prompts.shape[1], device=prompts.device)
    places = (columns + first.unsqueeze(1)) % max(1, prompts.shape[1])
    inside = columns < lengths.unsqueeze(1)
    return torch.where(inside, prompts.gather(1, places), 0), lengths


def join(batch: RolloutBatch, multiple_of: int) -> Tensor:
    """Return prompts and responses of a batch joined without a gap; see `RolloutBatch.joined`.

    Raises:
        DataError: a response has no prompt, so nothing predicts its first token.
    """
    orphans = ((batch.prompt_lengths == 0) & (batch.response_lengths > 0)).nonzero()
    if len(orphans):
        raise DataError(f"sample {int(orphans[0, 0])} has a response but an empty prompt: nothing predicts it")
    longest = int(batch.sequence_lengths.max()) if len(batch) else 0
    # At least one column, so that a model can read a batch of padding rows only.
    width = -(-max(longest, 1) // multiple_of) * multiple_of
    starts = batch.prompt_lengths.unsqueeze(1)
    tokens = torch.arange(batch.generated_ids.shape[1], device=starts.device)
    present = tokens < batch.response_lengths.unsqueeze(1)
    columns = torch.arange(batch.input_ids.shape[1], device=starts.device)
    prompt = torch.where(columns < starts, batch.input_ids, 0)
    token_ids = batch.input_ids.new_zeros(len(batch), width)
    kept = min(width, prompt.shape[1])
    token_ids[:, :kept] = prompt[:, :kept]
    places = torch.where(present, starts + tokens, 0)
    return token_ids.scatter_add(1, places, torch.where(present, batch.generated_ids, 0))


def answer_rows(batch: RolloutBatch) -> Tensor:
    """Return for each sample the row in which its episode ends, [B] int64.

    That is the last row of the episode with the same agent. If an episode has one conversation, it is the sample
    itself.
    """
    rows = torch.arange(len(batch))
    if "episode_ids" not in batch:
        return rows
    agents = batch.agent_ids if "agent_ids" in batch else torch.zeros_like(rows)
    _, number = torch.stack([batch.episode_ids, agents], dim=1).unique(dim=0, return_inverse=True)
    return torch.zeros_like(rows).scatter_reduce(0, number, rows, "amax")[number]


# Column of a batch with a list of one `SharedItem` per sample.
EXPERTS_COLUMN = "routed_experts"
# Stands for an unknown expert, so the trainer's router chooses.
ROUTERS_CHOICE = -1


def experts_column(generations: Sequence[Generation]) -> dict[str, list[Any]]:
    """Return the column of these responses, or an empty dictionary if the engine reports no experts."""
    if not generations or generations[0].routed_experts is None:
        return {}
    return {EXPERTS_COLUMN: [[_item(generation.routed_experts)] for generation in generations]}


def _item(experts: torch.Tensor | None) -> SharedItem:
    """Return the experts of one response as a shared item."""
    if experts is None:
        raise DataError("some responses report the experts of their tokens and others do not.")
    key = hashlib.blake2b(experts.contiguous().numpy().tobytes(), digest_size=16).hexdigest()
    return SharedItem(key, len(experts), lambda: {EXPERTS_COLUMN: experts})


def experts_of(entry: Sequence[SharedItem] | None) -> torch.Tensor | None:
    """Return an entry's experts, [tokens, layers, k], or None."""
    return entry[0].tensors[EXPERTS_COLUMN] if entry else None


def padded_experts(batch: RolloutBatch, width: int) -> torch.Tensor | None:
    """Return the experts of a batch, [B, width, layers, k] int16, or None if it has none.

    `ROUTERS_CHOICE` stands where the engine processed nothing: at the last token and at padding.

    Raises:
        DataError: a sample has another number of tokens than its experts cover.
    """
    column = batch.columns.get(EXPERTS_COLUMN)
    if column is None:
        return None
    experts = [experts_of(entry) for entry in column]
    example = next((sample_experts for sample_experts in experts if sample_experts is not None), None)
    if example is None:
        return None
    rows = torch.full((len(batch), width, *example.shape[1:]), ROUTERS_CHOICE, dtype=torch.int16)
    for row, (sample_experts, length) in enumerate(zip(experts, batch.sequence_lengths.tolist(), strict=True)):
        if sample_experts is not None:
            if len(sample_experts) != length - 1:
                raise DataError(
                    f"sample {row} has {length} tokens, and the engine's experts are of {len(sample_experts)}."
                )
            rows[row, : len(sample_experts)] = sample_experts
    return rows
