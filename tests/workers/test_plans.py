"""Plans of micro-batches: made once for all roles that plan alike, and never another's; and weights."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megaverl.data.batch import RolloutBatch
from megaverl.data.sequence_lengths import SequenceLengths
from megaverl.distributed.grid import GridShape
from megaverl.models.packing import pack
from megaverl.workers.micro_batches import (
    Weighting,
    mini_batch_mask,
    plan_for,
    run_updates,
)


def lengths() -> SequenceLengths:
    prompts = [number // 3 for number in range(16)]
    return SequenceLengths(
        [5 + prompt for prompt in prompts], [1 + 3 * n % 11 for n in range(16)], prompts
    )


def model(
    role: str = "actor",
    *,
    packs: bool = True,
    multiple: int = 1,
    each: int = 1,
    shares: bool = True,
    **shape: int,
) -> Any:
    grid = SimpleNamespace(shape=GridShape(**{"dp": 2, **shape}))
    return SimpleNamespace(
        role=role,
        grid=grid,
        pack=pack if packs else None,
        token_multiple=multiple,
        sequence_multiple=each,
        shares_tokens=shares,
    )


OTHERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "rows of their own": (model(packs=False), {}),
    "fuller rows": (model(multiple=48), {}),
    "sequences that are cut": (model(each=4), {}),
    "samples that share no tokens": (model(shares=False), {}),
    "more ranks": (model(dp=4), {}),
    "an interleaved pipeline": (model(pp=3, vpp=2), {}),
    "a smaller budget": (model(), {"max_tokens": 32}),
    "a mini-batch": (model(), {"samples": [0, 1, 2, 3, 8, 9]}),
    "more micro-batches": (model(), {"least": 4}),
    "pairs": (model(), {"unit": 2}),
    "islands": (model(), {"parts": 2}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_planned_otherwise_is_not_taken_from_before(name: str) -> None:
    known = lengths()
    first = plan_for(model(), known, 64)
    assert plan_for(model("reference"), known, 64) is first
    other, given = OTHERS[name]
    options = {"max_tokens": 64, **given}
    found = plan_for(other, known, **options)
    assert found == plan_for(other, lengths(), **options) and found != first
    assert plan_for(model(), known, 64) is first == plan_for(model(), lengths(), 64)


def test_an_episode_weighs_one_sequence_over_the_mini_batches_that_it_is_split_over() -> (
    None
):
    """By each of its two agents, whose rows are no one's share."""
    episodes = torch.tensor([3, 3, 3, 4, 5, 5, 3, 4])
    agents = torch.tensor([0, 0, 0, 0, 0, 0, 1, 1])
    sizes, seen = torch.tensor([2, 1, 3, 2, 0, 1, 2, 3]), []
    mask = torch.arange(3) < sizes.unsqueeze(1)
    lengths = {
        "prompt_lengths": torch.ones(8).long(),
        "response_lengths": torch.full((8,), 3),
    }
    tokens = {
        "input_ids": torch.arange(8).unsqueeze(1),
        "generated_ids": torch.ones(8, 3).long(),
    }
    batch = RolloutBatch(
        {
            **tokens,
            **lengths,
            "response_mask": mask,
            "episode_ids": episodes,
            "agent_ids": agents,
        }
    )

    def update(micro: Any, *_: Any, **__: Any) -> Any:
        seen.append(
            {
                int(row): w
                for each in micro
                for row, w in zip(each.samples, each.fields["weights"], strict=True)
            }
        )
        return SimpleNamespace(
            sums={}, grad_norm=0.0, learning_rate=0.0, is_skipped=False
        )

    own = model(packs=False, dp=1)
    own.grid.coords, own.vision, own.own_part = (
        SimpleNamespace(dp=0),
        None,
        lambda micro: micro,
    )
    trainable = SimpleNamespace(
        model=own,
        part=(0, 1),
        gradient_accumulation=1,
        update=update,
        updating=lambda: nullcontext(),
    )
    algorithm = SimpleNamespace(num_epochs=1, num_mini_batches=3)
    role: Any = SimpleNamespace(
        trainable=trainable, algorithm=algorithm, micro_batch_tokens=64, seed=1
    )
    run_updates(
        role,
        batch,
        lambda *_: None,
        weighting=Weighting("seq_mean_token_sum"),
        fields={},
        step=0,
    )
    assert len(seen) == 3 and sorted(row for each in seen for row in each) == list(
        range(8)
    )
    assert any(
        {0, 1, 2} & each.keys() and not {0, 1, 2} <= each.keys() for each in seen
    ), "an episode is split"
    parts = [1 / 3, 1 / 3, 1 / 3, 1, 0, 1, 1, 1]
    for each in seen:
        for row, weights in each.items():
            expected = mask[row] * parts[row] / sum(parts[other] for other in each)
            torch.testing.assert_close(weights, expected.float())


def test_the_mask_of_a_mini_batch_has_its_own_samples_alone() -> None:
    mask = torch.tensor([[True, True], [True, False], [False, False], [True, True]])
    assert mini_batch_mask(mask, [1, 2]).tolist() == [
        [False, False],
        [True, False],
        [False, False],
        [False, False],
    ]
    assert mini_batch_mask(mask, []).sum() == 0 and torch.equal(
        mini_batch_mask(mask, [0, 1, 2, 3]), mask
    )
    assert mask.sum() == 5, "the whole batch's mask stays as it is"
