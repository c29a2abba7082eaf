"""The benchmark's arithmetic, and the plain loop against megaverl's formulas; what it measures is not asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megaverl.algorithms.advantages import gae as gae_by_doubling
from megaverl.algorithms.advantages import token_rewards as rewards_of_tokens
from megaverl.algorithms.advantages import whiten
from megaverl.algorithms.loss import clipped
from megaverl.algorithms.policy_losses import ppo_clip
from megaverl.config import load_config
from tools import plain_ppo
from tools.bench_articles import (
    MIB,
    SPLIT,
    WAYS,
    Figures,
    Sample,
    Span,
    parse,
    plain_spans,
    settings,
    summarise,
    table,
)
from tools.step_sides import Job, prepare

TINY = Job(
    layers=1,
    hidden=32,
    ffn=64,
    heads=2,
    kv_heads=1,
    vocab=50,
    prompts=4,
    group=1,
    prompt_tokens=7,
    response_tokens=5,
    warmup=1,
    steps=1,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("bench")
    prepare(TINY, made)
    return made


# --- the plain loop ------------------------------------------------------------------------------------------------


def test_the_plain_loops_formulas_are_megaverls() -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (3, 6)
    rewards, values, new, old = (
        torch.randn(shape, generator=generator) for _ in range(4)
    )
    scores = torch.randn(3, generator=generator)
    mask = torch.arange(6) < torch.tensor([[6], [3], [1]])
    found, returns = plain_ppo.gae(rewards, values * mask, mask, 0.9, 0.8)
    expected = gae_by_doubling(rewards, values, mask, gamma=0.9, lam=0.8)
    torch.testing.assert_close(found, expected.advantages)
    torch.testing.assert_close(returns, expected.returns)
    torch.testing.assert_close(
        plain_ppo.token_rewards(scores, new - old, mask, 0.3),
        rewards_of_tokens(scores, mask, new - old, kl_coef=0.3),
    )
    torch.testing.assert_close(plain_ppo.normalize(found, mask), whiten(found, mask))
    weights = mask / mask.sum()
    losses = plain_ppo.policy_loss(new / 5, old / 5, found)
    torch.testing.assert_close(
        (losses * weights).sum(), ppo_clip(new / 5, old / 5, found, weights).loss
    )
    losses = plain_ppo.value_loss(new, values, returns)
    torch.testing.assert_close(
        (losses * weights).sum(), clipped(new, values, returns, weights).loss
    )


def test_the_plain_loop_reads_padded_prompts_as_whole_ones(folder: Path) -> None:
    trainer = plain_ppo.PlainPPO(folder, TINY)
    tokens = torch.tensor([[0, 0, 3, 4, 5, 6, 7]])
    mask = torch.tensor([[False, False, True, True, True, True, True]])
    padded = plain_ppo.Batch(tokens, mask, num_prompt=4)
    alone = plain_ppo.Batch(tokens[:, 2:], mask[:, 2:], num_prompt=2)
    found = plain_ppo.log_probs(trainer.policy, padded)
    logits = trainer.policy(input_ids=tokens[:, 2:]).logits.log_softmax(-1)[0]
    expected = logits[[1, 2, 3], [5, 6, 7]][None]
    torch.testing.assert_close(found, expected)
    torch.nn.init.ones_(trainer.critic.head.weight)
    torch.testing.assert_close(trainer.critic(padded), trainer.critic(alone))


def test_a_step_of_the_plain_loop(folder: Path) -> None:
    """Every response has the full length, and both models move."""
    trainer = plain_ppo.PlainPPO(folder, TINY)
    before = [
        [parameter.clone() for parameter in model.parameters()]
        for model in (trainer.policy, trainer.critic)
    ]
    rows = (folder / "prompts.jsonl").read_text().splitlines()[:4]
    # The policy becomes another one than the reference, so that there is a KL.
    with torch.no_grad():
        next(trainer.policy.parameters()).mul_(1.5)
    measured = trainer.step(0, [json.loads(row)["prompt"] for row in rows])
    assert measured["tokens"] == 4 * TINY.response_tokens
    assert measured["kl"] != 0 and 0 < measured["reward"] <= 1
    for model, old in zip((trainer.policy, trainer.critic), before, strict=True):
        assert any(
            not torch.equal(parameter, value)
            for parameter, value in zip(model.parameters(), old, strict=True)
        )
    names = [record["name"] for record in trainer.spans.records]
    assert names[0] == "rollout" and names[-2:] == ["critic_update", "actor_update"]


# --- the benchmark -------------------------------------------------------------------------------------------------


def test_every_way_is_a_valid_run(folder: Path) -> None:
    for way in WAYS:
        if way == "plain":
            continue
        config = load_config(None, settings(TINY, folder, way), command="train")
        assert config.samples_per_step == 4 and config.uses_critic
        assert config.placement.is_given == (way != "shared")
        assert config.rollout.async_rollout == (way == "asynchronous")
    assert SPLIT["rollout"] == 1


def test_figures_are_of_the_steps_after_the_warm_up(tmp_path: Path) -> None:
    """Steps end at 10, 12 and 15 s; the responses of the last one begin in the step before."""
    spans = [
        Span(0, "actor_update", 0, 9.0, 10.0),
        Span(1, "rollout", 1, 9.5, 10.5),
        Span(0, "actor_update", 1, 11.0, 12.0),
        Span(1, "rollout", 2, 11.0, 12.5),
        Span(0, "critic_update", 2, 13.0, 13.5),
        Span(0, "actor_update", 2, 13.5, 15.0),
    ]
    lines = [json.dumps(span.__dict__) + "\n" for span in spans]
    (tmp_path / "spans_0.jsonl").write_text("".join(lines))
    assert plain_spans(tmp_path) == spans
    samples = [
        Sample(9.0, {0: 900 * MIB, 1: 1}, {0: 0.0, 1: 0.0}, 5),
        Sample(10.0, {0: 10 * MIB, 1: 7}, {0: 5.0, 1: 1.0}, 100),
        Sample(14.0, {0: 20 * MIB, 1: 3}, {0: 8.0, 1: 2.0}, 500),
        Sample(16.0, {0: 990 * MIB, 1: 1}, {0: 9.0, 1: 3.0}, 900),
    ]
    job = Job(warmup=1, steps=2)
    figures = summarise(spans, samples, job, reshards=3.0)
    assert figures == Figures(
        step=2.5,
        processor=pytest.approx(4 / 4 * 2.5),
        utilisation={0: 0.75, 1: 0.25},
        latency=pytest.approx((2.5 + 4.0) / 2),
        stages={"rollout": 1.25, "log-probs and values": 0.0, "updates": 1.5},
        sockets=pytest.approx(250.0),
        reshards=3.0,
        memory={0: 20 * MIB, 1: 7},
    )
    shown = table(job, {"shared": figures, "plain": figures})
    assert "| step, s | 2.50 (1.00×) | 2.50 (1.00×) |" in shown
    assert "50% (75%, 25%)" in shown


def test_prompts_fill_the_mini_batches_of_both_ranks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert parse([]).job.prompts == 8
    with pytest.raises(SystemExit):
        parse(["--prompts", "6"])
    assert "Use a multiple of 4" in capsys.readouterr().err
