from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from megaverl.data.batch import MissingField, RolloutBatch, scatter_rows
from megaverl.data.batch_fields import FIELDS, Field, declare_field
from megaverl.errors import DataError


class Generation(NamedTuple):
    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str = "stop"
    routed_experts: None = None


@pytest.fixture
def batch() -> RolloutBatch:
    """Three samples: a long response, an empty one, a long prompt."""
    prompts = [[11, 12], [21], [31, 32, 33]]
    generations = [
        Generation([13, 14, 15], [-1.0, -2.0, -3.0]),
        Generation([], [], "length"),
        Generation([34], [-4.0]),
    ]
    return RolloutBatch.from_generations(
        prompts,
        generations,
        group_ids=[7, 7, 8],
        columns={"prompt": ["a", "b", "c"]},
        pad_id=2,
    )


def test_from_generations(batch):
    assert batch.input_ids.tolist() == [[11, 12, 2], [21, 2, 2], [31, 32, 33]]
    assert batch.prompt_lengths.tolist() == [2, 1, 3]
    assert batch.generated_ids.tolist() == [[13, 14, 15], [2, 2, 2], [34, 2, 2]]
    assert batch.response_mask.tolist() == [
        [True] * 3,
        [False] * 3,
        [True, False, False],
    ]
    assert batch.response_lengths.tolist() == [3, 0, 1]
    assert batch.rollout_log_probs.tolist() == [
        [-1.0, -2.0, -3.0],
        [0.0] * 3,
        [-4.0, 0.0, 0.0],
    ]
    assert batch.group_ids.tolist() == [7, 7, 8]
    assert batch.columns == {
        "prompt": ["a", "b", "c"],
        "finish_reason": ["stop", "length", "stop"],
    }
    assert batch.sequence_lengths.tolist() == [5, 1, 4]
    assert "B=3, S=3, R=3" in repr(batch)


def test_generations_that_do_not_fit_are_refused():
    with pytest.raises(DataError, match="2 prompts, but 1 generations"):
        RolloutBatch.from_generations([[1], [2]], [Generation([1], [0.0])])
    with pytest.raises(DataError, match="generation 0 has 2 tokens, but 1 log-probs"):
        RolloutBatch.from_generations([[1]], [Generation([1, 2], [0.0])])


def test_with_adds_a_tensor_and_leaves_the_batch_alone(batch):
    more = batch.with_(
        rewards=torch.tensor([1, 0.5, 0], dtype=torch.float64), values=torch.ones(3, 3)
    )
    assert (
        more.rewards.dtype == torch.float32
        and "rewards" in more
        and "rewards" not in batch
    )
    assert more.input_ids is batch.input_ids
    assert more.with_columns(reference=[1, 2, 3]).columns["reference"] == [1, 2, 3]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {"values": torch.ones(3, 4)},
            r"'values' \(the critic's .*\) has shape \[3, 4\]; expected \[3, 3\]",
        ),
        (
            {"rewards": torch.ones(3, 1)},
            r"'rewards' .* has shape \[3, 1\]; expected \[3\] = \[samples\]",
        ),
        # one row, that would broadcast to all samples
        (
            {"rewards": torch.ones(1)},
            r"'rewards' .* has shape \[1\]; expected \[3\] = \[samples\]",
        ),
        (
            {"rewards": torch.tensor(1.0)},
            r"'rewards' .* has shape \[\]; expected \[3\]",
        ),
        (
            {"values": torch.ones(1, 3)},
            r"'values' .* has shape \[1, 3\]; expected \[3, 3\]",
        ),
        (
            {"values": torch.ones(3, 1)},
            r"'values' .* has shape \[3, 1\]; expected \[3, 3\]",
        ),
        (
            {"group_ids": torch.tensor([7])},
            r"'group_ids' .* has shape \[1\]; expected \[3\]",
        ),
        (
            {"rewards": torch.ones(3).long()},
            r"'rewards' .* is torch.int64; expected torch.float32",
        ),
        (
            {"response_mask": torch.ones(3, 3)},
            r"'response_mask' .* is torch.float32; expected torch.bool",
        ),
        ({"valeus": torch.ones(3, 3)}, r"no field 'valeus'; did you mean values"),
        (
            {"prompt_lengths": torch.tensor([1, 4, 1])},
            r"'prompt_lengths' of sample 1 is 4; expected 0 to 3",
        ),
        (
            {"response_lengths": torch.tensor([3, 0, 0])},
            r"'response_mask' of sample 2 goes beyond",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(batch, tensors, message):
    with pytest.raises(DataError, match=message):
        batch.with_(**tensors)


def test_what_is_missing_is_named(batch):
    with pytest.raises(
        MissingField,
        match="does not hold 'values' yet; it holds generated_ids, group_ids",
    ):
        _ = batch.values
    with pytest.raises(AttributeError, match="no attribute 'valeus'"):
        _ = batch.valeus
    assert not hasattr(batch, "values")
    with pytest.raises(DataError, match="missing: prompt_lengths, response_mask"):
        RolloutBatch(
            {
                "input_ids": torch.ones(1, 1).long(),
                "generated_ids": torch.ones(1, 1).long(),
            }
        )
    with pytest.raises(
        DataError, match="column 'prompt' has 2 entries for a batch of 3"
    ):
        batch.with_columns(prompt=["a", "b"])


def test_select_and_concat(batch):
    batch = batch.with_(rewards=torch.tensor([1.0, 2.0, 3.0]))
    picked = batch.select([2, 0])
    assert picked.rewards.tolist() == [3.0, 1.0] and picked.columns["prompt"] == [
        "c",
        "a",
    ]
    assert batch.select(slice(1, 3)).columns["prompt"] == ["b", "c"]
    assert batch.select(torch.tensor([1])).group_ids.tolist() == [7]
    assert len(batch.select([])) == 0
    with pytest.raises(DataError, match="sample 3 asked for in a batch of 3"):
        batch.select([3])

    again = RolloutBatch.concat(
        [batch.select([0]).trim(), batch.select([1]).trim(), batch.select([2]).trim()]
    )
    assert again.rewards.tolist() == [1.0, 2.0, 3.0] and again.columns == batch.columns
    assert again.generated_ids.shape == (3, 3) and torch.equal(
        again.response_mask, batch.response_mask
    )
    assert torch.equal(again.joined(), batch.joined())
    with pytest.raises(
        DataError, match="batch 0 and batch 1 differ in what they hold: values"
    ):
        RolloutBatch.concat([batch, batch.with_(values=torch.ones(3, 3))])
    with pytest.raises(DataError, match="no batches"):
        RolloutBatch.concat([])


def test_pad_and_trim_undo_each_other(batch):
    wide = batch.pad_to(samples=5, prompt=6, response=4)
    assert wide.input_ids.shape == (5, 6) and wide.response_mask.shape == (5, 4)
    assert wide.group_ids.tolist() == [7, 7, 8, -1, -1] and wide.columns["prompt"] == [
        "a",
        "b",
        "c",
        None,
        None,
    ]
    assert not wide.response_mask[3:].any() and wide.sequence_lengths.tolist() == [
        5,
        1,
        4,
        0,
        0,
    ]
    back = wide.select([0, 1, 2]).trim()
    for name in batch:
        assert torch.equal(
            back[name].where(back[name] != 2, 0), batch[name].where(batch[name] != 2, 0)
        ), name
    with pytest.raises(DataError, match="cannot be padded"):
        batch.pad_to(response=2)


def test_joined_by_hand(batch):
    assert batch.joined().tolist() == [
        [11, 12, 13, 14, 15],
        [21, 0, 0, 0, 0],
        [31, 32, 33, 34, 0],
    ]
    wide = batch.joined(multiple_of=4)
    assert (
        wide.shape == (3, 8)
        and torch.equal(wide[:, :5], batch.joined())
        and not wide[:, 5:].any()
    )


def test_tokens_of_others_are_joined_but_do_not_train(batch):
    mask = torch.tensor([[True, False, True], [False] * 3, [False, False, False]])
    turns = batch.with_(response_mask=mask)
    assert torch.equal(turns.joined(), batch.joined())


def test_a_row_of_padding_can_be_read_by_a_model(batch):
    assert batch.select([]).pad_to(samples=1).trim().joined(multiple_of=2).tolist() == [
        [0, 0]
    ]


def test_sequences_that_cannot_be_joined_are_refused(batch):
    with pytest.raises(DataError, match="sample 0 has a response but an empty prompt"):
        batch.with_(prompt_lengths=torch.tensor([0, 1, 1])).joined()


def test_scatter_rows_puts_micro_batches_back():
    parts = [
        ([2, 0], torch.tensor([[1.0, 2.0], [3.0, 4.0]])),
        ([], torch.ones(1, 0)),
        ([1], torch.tensor([[5.0], [9.0]])),
    ]
    assert scatter_rows(3, 3, parts).tolist() == [[3, 4, 0], [5, 0, 0], [1, 2, 0]]
    with pytest.raises(
        DataError, match=r"result \[2, 2\] of 2 samples does not fit a width of 1"
    ):
        scatter_rows(3, 1, parts)
    with pytest.raises(DataError, match=r"result \[1, 2\] of 2 samples does not fit"):
        scatter_rows(3, 2, [([2, 0], torch.ones(1, 2))])  # which would broadcast
    assert scatter_rows(
        2, 2, [([1], torch.tensor([[1.0], [9.0], [9.0]]))]
    ).tolist() == [[0, 0], [1, 0]]
    with pytest.raises(DataError, match="no micro-batch results"):
        scatter_rows(3, 1, [])


def test_a_field_of_ones_own(batch):
    try:
        declare_field("turns_for_test", Field(torch.int64, "R", -1))
        assert (
            batch.with_(turns_for_test=torch.ones(3, 3).int())
            .pad_to(response=4)
            .turns_for_test[0, 3]
            == -1
        )
        with pytest.raises(DataError, match="already declared"):
            declare_field("turns_for_test", Field(torch.float32, "R"))
        with pytest.raises(DataError, match="axes out of 'S' and 'R'"):
            declare_field("other_for_test", Field(torch.float32, "RX"))
    finally:
        del FIELDS["turns_for_test"]


PROMPTS = torch.tensor([[0, 0, 5], [6, 7, 8]])  # padded on the left
ATTENDED = torch.tensor([[0, 0, 1], [1, 1, 1]])


@pytest.mark.parametrize(
    ("prompts", "mask", "generated"),
    [
        # As `generate` of transformers returns them.
        (PROMPTS, ATTENDED, [[0, 0, 5, 9, 1], [6, 7, 8, 2, 3]]),
        (PROMPTS.flip(1), ATTENDED.flip(1), [[5, 0, 0, 9, 1], [8, 7, 6, 2, 3]]),
        # Each prompt without its padding.
        (PROMPTS, ATTENDED, [[5, 9, 1, 0, 0], [6, 7, 8, 2, 3]]),
    ],
)
def test_responses_that_begin_with_their_prompts(prompts, mask, generated):
    full = torch.tensor(generated)
    own = (full == 9) | (full == 1) | (full == 2) | (full == 3)
    named = {"input_ids": prompts, "attention_mask": mask, "generated_ids": full}
    further = {"generated_mask": own, "logprobs": torch.where(own, -full.float(), 7.0)}
    with pytest.raises(
        DataError,
        match="all 2 rows begin with their own prompt.*generated_includes_prompt=True",
    ):
        RolloutBatch(**named)
    batch = RolloutBatch(**named, **further, generated_includes_prompt=True)
    assert [row[:2] for row in batch.generated_ids.tolist()] == [[9, 1], [2, 3]]
    assert (
        batch.response_lengths.tolist() == [2, 2]
        and batch.prompt_lengths.tolist() == mask.sum(1).tolist()
    )
    assert batch.logprobs[:, :2].tolist() == [[-9.0, -1.0], [-2.0, -3.0]]
    assert torch.equal(
        RolloutBatch(**named, generated_includes_prompt=False).generated_ids, full
    )


def test_log_probs_of_the_responses_alone_are_as_wide_as_they_are():
    full = torch.cat([PROMPTS, torch.tensor([[9, 1], [2, 3]])], dim=1)
    named = {
        "input_ids": PROMPTS,
        "attention_mask": ATTENDED,
        "generated_ids": full,
        "logprobs": torch.ones(2, 2),
    }
    assert torch.equal(
        RolloutBatch(**named, generated_includes_prompt=True).logprobs, torch.ones(2, 2)
    )


def test_one_response_that_repeats_its_prompt_is_a_response():
    named = {
        "input_ids": PROMPTS,
        "attention_mask": ATTENDED,
        "generated_ids": torch.tensor([[5, 1], [6, 9]]),
    }
    assert RolloutBatch(**named).generated_ids.tolist() == [[5, 1], [6, 9]]
    with pytest.raises(
        DataError, match="'generated_ids' of sample 1 does not begin with its prompt"
    ):
        RolloutBatch(**named, generated_includes_prompt=True)
