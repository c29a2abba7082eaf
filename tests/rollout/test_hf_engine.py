"""The plain engine, against transformers' own forward pass and against the distribution it claims."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from megaverl.errors import RolloutError
from megaverl.models.architectures import weights_of
from megaverl.models.tiny import make_tiny_folder
from megaverl.rollout.engine import Engine, InFlight, SamplingOptions
from megaverl.rollout.hf_engine import HFEngine, draw, sampled_distribution
from megaverl.sharding.model_spec import (
    ARCHITECTURES,
    ModelSpec,
    why_not_in_transformers,
)
from megaverl.sharding.weight import shapes_of
from tests.launcher import Launcher

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14], [5, 6, 7]]
SEEDS = [1, 2, 3, 4]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_folder(tmp_path_factory.mktemp("model"), tie_embeddings=True)


@pytest.fixture(scope="module")
def engine(folder: Path) -> HFEngine:
    return HFEngine(folder, dtype=torch.float32, max_model_len=64, stop_token_ids=[1])


def test_log_probs_are_of_the_drawn_tokens(engine: HFEngine) -> None:
    """... each prompt's own, where they are drawn in different ways: as when it is drawn alone."""
    ways = [
        SamplingOptions(12, 0.7, top_k=30, top_p=0.9),
        SamplingOptions(12, 0.0),
        SamplingOptions(9, 1.3),
    ]
    ways.append(ways[0])
    for prompt, seed, sampling, found in zip(
        PROMPTS, SEEDS, ways, engine.generate(PROMPTS, ways, SEEDS), strict=True
    ):
        assert (
            engine.generate([prompt], sampling, [seed])[0].token_ids == found.token_ids
        )
        with torch.no_grad():
            logits = engine.model(torch.tensor([prompt + found.token_ids])).logits[
                0, len(prompt) - 1 : -1
            ]
        expected = sampled_distribution(logits, sampling).gather(
            1, torch.tensor(found.token_ids)[:, None]
        )[:, 0]
        torch.testing.assert_close(
            torch.tensor(found.log_probs), expected, atol=1e-5, rtol=0
        )


@pytest.mark.parametrize(
    "architecture",
    [a for a in ARCHITECTURES if not why_not_in_transformers(a)],
)
def test_responses_of_ragged_prompts_have_the_probability_of_each_alone(
    architecture: str, tmp_path: Path
) -> None:
    """Neither padding nor what is kept from token to token changes a row."""
    folder = make_tiny_folder(tmp_path / "model", architecture, initializer_range=0.1)
    engine = HFEngine(folder, dtype=torch.float32, max_model_len=64)
    found = engine.generate(PROMPTS, SamplingOptions(6, 1.0), SEEDS)
    joined = [
        prompt + response.token_ids
        for prompt, response in zip(PROMPTS, found, strict=True)
    ]
    for prompt, response, score in zip(
        PROMPTS, found, engine.score_prompts(joined), strict=True
    ):
        expected = score.log_probs[len(prompt) - 1 :]
        assert response.log_probs == pytest.approx(expected, abs=1e-4)


def test_scores_of_prompts(engine: HFEngine) -> None:
    """The last most likely token is the one that a greedy response begins with."""
    greedy = engine.generate(PROMPTS, SamplingOptions(1, 0.0), SEEDS)
    for prompt, first, score in zip(
        PROMPTS, greedy, engine.score_prompts(PROMPTS), strict=True
    ):
        with torch.no_grad():
            log_probs = engine.model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        places = list(enumerate(prompt[1:]))
        expected = [float(log_probs[place, token]) for place, token in places]
        assert score.log_probs == pytest.approx(expected, abs=1e-5)
        assert score.top_tokens == log_probs.argmax(-1).tolist()
        assert score.top_tokens[-1] == first.token_ids[0]
        assert score.top_log_probs[-1] == pytest.approx(first.log_probs[0], abs=1e-5)
    with pytest.raises(RolloutError, match="max_model_len"):
        engine.score_prompts([[5] * 64])


def test_a_mixture_with_the_reference(
    folder: Path, engine: HFEngine, tmp_path: Path
) -> None:
    """policy^(1 - beta) reference^beta, normalised: log-probs of every token by hand,
    and how often each is drawn; who is not drawn so is drawn as by the engine alone.
    """
    other = make_tiny_folder(tmp_path / "other", tie_embeddings=True, seed=5)
    both = HFEngine(
        folder,
        dtype=torch.float32,
        max_model_len=64,
        stop_token_ids=[1],
        reference_folder=other,
    )
    plain = SamplingOptions(12, 0.7)
    mixed = plain.mixed(0.25)
    assert (plain.reference_share, mixed.temperature, mixed.max_tokens) == (
        0.0,
        0.7,
        12,
    )
    ways = [mixed, plain, mixed, plain]
    found, alone = (
        both.generate(PROMPTS, ways, SEEDS),
        engine.generate(PROMPTS, plain, SEEDS),
    )
    assert [found[n].token_ids for n in (1, 3)] == [alone[n].token_ids for n in (1, 3)]

    def by_hand(prompt: list[int], tokens: list[int]) -> torch.Tensor:
        """[tokens, vocabulary] log-probs."""
        ids = torch.tensor([prompt + tokens])
        with torch.no_grad():
            mine, theirs = (
                (model(ids).logits[0, len(prompt) - 1 : -1] / 0.7).softmax(-1)
                for model in (both.model, both.reference)
            )
        weighed = mine**0.75 * theirs**0.25
        return (weighed / weighed.sum(-1, keepdim=True)).log()

    for prompt, one, way in zip(PROMPTS, found, ways, strict=True):
        if way is mixed:
            expected = by_hand(prompt, one.token_ids).gather(
                1, torch.tensor(one.token_ids)[:, None]
            )[:, 0]
            torch.testing.assert_close(
                torch.tensor(one.log_probs), expected, atol=1e-5, rtol=0
            )
    count = 6000
    draws = both.generate(
        [PROMPTS[0]] * count, SamplingOptions(1, 0.7).mixed(0.25), range(count)
    )
    shares = (
        torch.bincount(
            torch.tensor([draw.token_ids[0] for draw in draws]), minlength=100
        )
        / count
    )
    likely = by_hand(PROMPTS[0], [0])[0].exp()
    assert (shares - likely).abs().max() < 5 * math.sqrt(0.25 / count)
    assert (
        (shares - likely).abs().sum()
        < 0.12
        < (shares - by_hand(PROMPTS[0], [0])[0].softmax(0).roll(1)).abs().sum()
    )


def test_what_is_drawn_depends_on_seed_and_not_on_company(engine: HFEngine) -> None:
    """... and each response is told of when it is finished, the shortest first."""
    sampling, heard = SamplingOptions(max_tokens=12, stop_token_ids=range(40)), {}
    engine.on_finished = heard.__setitem__
    found = engine.generate(PROMPTS, sampling, SEEDS)
    engine.on_finished = None
    assert heard == dict(enumerate(found))
    assert (
        list(heard)
        == sorted(heard, key=lambda number: len(found[number].token_ids))
        != sorted(heard)
    )
    alone = [
        engine.generate([p], sampling, [s])[0]
        for p, s in zip(PROMPTS, SEEDS, strict=True)
    ]
    assert [a.token_ids for a in alone] == [f.token_ids for f in found]
    assert found[0].token_ids != found[3].token_ids  # one prompt, two seeds


def test_as_many_at_once_as_there_is_room_for(engine: HFEngine) -> None:
    """Of a budget for 40 tokens and a half, and responses of up to 18: two at once; the draws are the same."""
    sampling = SamplingOptions(max_tokens=12)
    free = engine.generate(PROMPTS, sampling, SEEDS)
    engine.in_flight = InFlight(
        least=1, most=8, budget=int(40.5 * engine._bytes_per_token)
    )
    try:
        found = engine.generate(PROMPTS, sampling, SEEDS)
        assert engine.in_flight.number == 2
    finally:
        engine.in_flight = None
    assert [one.token_ids for one in found] == [one.token_ids for one in free]


@pytest.mark.parametrize(
    ("free", "longest", "number"), [(0, 10, 2), (39, 10, 3), (10_000, 10, 8), (5, 0, 5)]
)
def test_the_number_at_once_stays_within_its_bounds(
    free: int, longest: int, number: int
) -> None:
    assert InFlight(least=2, most=8).choose(free, longest) == number


def test_the_budget_is_half_of_what_is_free_and_stays_while_it_is_free() -> None:
    """A run that goes on with a budget keeps it where more is free, so that it batches as before."""
    in_flight, found = InFlight(least=1, most=8, measures=True), []
    for free in (1000, 1000, 5000, 256, 255, 90, 0):
        in_flight.fit(free)
        found.append(in_flight.budget)
    assert found == [256, 256, 256, 256, 64, 64, 1]
    resumed = InFlight(least=1, most=8, budget=64, measures=True)
    resumed.fit(5000)
    given = InFlight(least=1, most=8, budget=300)
    given.fit(100)
    assert (resumed.budget, given.budget) == (64, 300)


def test_all_ranks_take_the_least_of_their_free_memory(
    launch: Launcher, tmp_path: Path
) -> None:
    found = launch.world(
        2, "tests.rollout.ranks:budgets", folder=make_tiny_folder(tmp_path)
    )
    assert found[0]["budget"] == found[1]["budget"], (
        "or else a checkpoint could not say it for all"
    )
    assert found[1]["free"] < found[0]["free"] / 3
    assert found[1]["free"] / 8 < found[0]["budget"] <= found[1]["free"]
    assert [answer["number"] for answer in found] == [3, 3] and found[0][
        "answers"
    ] == found[1]["answers"]


def test_stop_token_is_the_last_one(engine: HFEngine) -> None:
    [free] = engine.generate(
        [[5, 6, 7]], SamplingOptions(max_tokens=12, ignore_eos=True), [1]
    )
    stop = free.token_ids[4]
    first = free.token_ids.index(stop) + 1
    [found] = engine.generate(
        [[5, 6, 7]], SamplingOptions(max_tokens=12, stop_token_ids=[stop]), [1]
    )
    assert found.token_ids == free.token_ids[:first] and found.finish_reason == "stop"
    assert free.finish_reason == "length" and len(free.token_ids) == 12


def test_distribution_keeps_the_smallest_set_and_sums_to_one() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    kept = sampled_distribution(logits, SamplingOptions(1, top_p=0.75)).exp()
    torch.testing.assert_close(kept, torch.tensor([[0.5 / 0.8, 0.3 / 0.8, 0.0, 0.0]]))
    kept = sampled_distribution(logits, SamplingOptions(1, top_k=3)).exp()
    torch.testing.assert_close(kept, torch.tensor([[0.5, 0.3, 0.15, 0.0]]) / 0.95)
    squared = sampled_distribution(logits, SamplingOptions(1, temperature=0.5)).exp()
    torch.testing.assert_close(
        squared, logits.exp().square() / logits.exp().square().sum()
    )


def test_draws_follow_the_distribution() -> None:
    probs = torch.tensor([0.6, 0.3, 0.1])
    count = 4000
    rows = probs.log().expand(count, 3)
    tokens = draw(
        rows,
        SamplingOptions(1),
        [torch.Generator().manual_seed(i) for i in range(count)],
    )
    shares = torch.bincount(tokens, minlength=3) / count
    for share, prob in zip(shares.tolist(), probs.tolist(), strict=True):
        assert abs(share - prob) < 5 * math.sqrt(prob * (1 - prob) / count)


def test_layout_names_every_parameter(engine: HFEngine, folder: Path) -> None:
    spec = ModelSpec.from_folder(folder)
    held: Engine = engine
    layout = held.layouts(shapes_of(weights_of(spec)))(0)
    shapes = {
        name: tuple(parameter.shape)
        for name, parameter in held.named_parameters().items()
    }
    assert layout.local_shapes == shapes
    assert (held.replica, held.num_replicas, held.tp_rank, held.tp_size) == (0, 1, 0, 1)


def test_what_it_cannot_do_is_named(engine: HFEngine) -> None:
    with pytest.raises(
        RolloutError, match="min_p cannot be used with rollout.engine=hf"
    ):
        engine.generate([[5]], SamplingOptions(4, min_p=0.1), [0])
    with pytest.raises(RolloutError, match="prompt 0 has 62 tokens"):
        engine.generate([[5] * 62], SamplingOptions(4), [0])
