"""Tokens that take the experts they are told: log-probs, gradients and counts, against transformers in float64."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megaverl.config.passthrough import recompute_fields
from megaverl.data.batch import RolloutBatch
from megaverl.models.layers import BiasedChoice
from megaverl.models.router_replay import ReplayedRouter, counted
from megaverl.models.tiny import make_tiny_folder
from megaverl.sharding.model_spec import ModelSpec
from tests.launcher import Launcher
from tests.workers.ranks import told_expert
from tests.workers.test_against_transformers import (
    GRPO,
    assert_right,
    by_transformers,
    grpo,
)
from tests.workers.test_parallel_invariance import updated

FULL = recompute_fields("full", dense=False, experts=True, fused_attention=False)
SELECTIVE = recompute_fields(
    "selective", dense=False, experts=True, fused_attention=False
)
CUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "one, padded": ({}, {"pack_samples": False}),
    "tp2, experts computed again": (
        {"tp": 2},
        {"megatron": SELECTIVE, "micro_batch_tokens": 24},
    ),
    "pp2, all computed again": (
        {"pp": 2},
        {"megatron": FULL, "micro_batch_tokens": 24},
    ),
    "cp2 ep2": ({"cp": 2, "ep": 2}, {}),
    "tp2 ep2 padded": (
        {"tp": 2, "ep": 2, "etp": 1},
        {"pack_samples": False, "micro_batch_tokens": 30},
    ),
}


@contextmanager
def told(model: torch.nn.Module) -> Iterator[None]:
    """Inside, every token of transformers' model but the last takes the experts of `told_expert`."""
    seen: dict[str, Any] = {}

    def look(
        module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        seen["tokens"] = (args[0] if args else kwargs["input_ids"])[0].tolist()

    model.model.register_forward_pre_hook(look, with_kwargs=True)
    for number, layer in enumerate(model.model.layers):
        gate = layer.mlp.gate

        def forward(
            hidden: torch.Tensor, gate: Any = gate, number: int = number
        ) -> tuple[torch.Tensor, ...]:
            logits = torch.nn.functional.linear(
                hidden.reshape(-1, gate.hidden_dim), gate.weight
            )
            own = logits[-1:].topk(gate.top_k).indices
            rows = [
                told_expert(token, number, gate.num_experts)
                for token in seen["tokens"][:-1]
            ]
            taken = torch.cat([torch.tensor(rows).view(-1, gate.top_k), own])
            return (
                logits,
                logits.softmax(-1)
                .gather(1, taken)
                .div(logits.softmax(-1).gather(1, taken).sum(1, True)),
                taken,
            )

        gate.forward = forward
    yield


def told_grpo(model: torch.nn.Module, batch: RolloutBatch) -> torch.Tensor:
    with told(model):
        return grpo(model, batch)


def test_an_update_with_told_experts_is_that_of_transformers_and_autograd(
    launch: Launcher, tmp_path: Path
) -> None:
    folder = make_tiny_folder(
        tmp_path / "model", "Qwen3MoeForCausalLM", tie_embeddings=False
    )
    expected = by_transformers(folder, told_grpo, same_prompts=3)
    before = load_file(folder / "model.safetensors")
    seen: list[dict[str, float]] = []
    for name, (shape, changes) in CUTS.items():
        given = {"same_prompts": 3, "router_replay": "update", **GRPO, **changes}
        found = updated(launch, folder, tmp_path / name, shape, **given)
        assert_right(found, expected, before, name)
        seen.append(
            {key: value for key, value in found[0].items() if key.startswith("moe/")}
        )
    assert seen[0]["moe/routes_differ"] > 0.5 and seen[0]["moe/load_max"] > 1
    for other in seen[1:]:
        assert other == pytest.approx(seen[0], abs=1e-5), (
            "each token counts once, wherever it is"
        )
    with pytest.raises(AssertionError):
        assert_right(
            found,
            by_transformers(folder, grpo, same_prompts=3),
            before,
            "it makes no difference",
        )


@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "Llama4ForCausalLM"])
def test_an_engine_says_which_experts_it_took(
    launch: Launcher, tmp_path: Path, architecture: str
) -> None:
    """Those of transformers' routers for the same tokens, of prompts and responses; the last token is never read.

    Llama 4 has dense layers as well, and sends a token to one expert.
    """
    sizes = {
        "hidden_size": 128,
        "head_dim": 32,
        "num_hidden_layers": 3,
        "num_experts": 8,
        "num_local_experts": 8,
        "attention_chunk_size": 32,
    }
    folder = make_tiny_folder(
        tmp_path / "model", architecture, initializer_range=0.1, **sizes
    )
    spec = ModelSpec.from_folder(folder)
    assert spec.moe is not None
    num_chosen = spec.moe.experts_per_token
    prompts = [[5, 6, 7], [5, 6, 7], list(range(40)), [9, 8], [3] * 20, [1, 2]]
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"
    )
    ranks = launch.world(
        2,
        "tests.workers.moe_ranks:generate_with_experts",
        folder=folder,
        prompts=prompts,
    )
    assert ranks[0] == ranks[1] and len(ranks[0]) == len(prompts)
    seen = set()
    for prompt, (tokens, experts) in zip(prompts, ranks[0], strict=True):
        logits = model(
            torch.tensor([[*prompt, *tokens[:-1]]]), output_router_logits=True
        ).router_logits
        expected = torch.stack(
            [each.topk(num_chosen).indices.sort().values for each in logits], dim=1
        )
        found = torch.tensor(experts)[:, torch.tensor(spec.routed_layers)]
        assert torch.equal(found.sort().values, expected)
        seen |= set(expected.flatten().tolist())
    assert seen == set(range(8))


def router(*, softmax: bool = True) -> ReplayedRouter:
    config = SimpleNamespace(num_moe_experts=4, moe_router_pre_softmax=False)
    kind: Any = SimpleNamespace(
        config=config, score_function="softmax" if softmax else "sigmoid"
    )
    return ReplayedRouter(kind)


def top_k(
    scores: torch.Tensor, topk: int, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return scores.topk(topk, dim=1)


def test_layers_that_are_computed_again_take_what_their_forward_pass_took() -> None:
    one, scores = router(), torch.tensor([[4.0, 3.0, 2.0, 1.0]])

    def run() -> list[int]:
        return one.get_replay_topk(scores, 2, default_compute_topk=top_k)[1].tolist()[0]

    first, second, third = (torch.tensor([[a, 3]]) for a in (0, 1, 2))
    # Two micro-batches ahead, as on a first pipeline stage.
    for experts in (first, second):
        one.expect(experts, None, is_kept=True)
        with torch.no_grad():
            assert run() == experts.tolist()[0]
    assert run() == [0, 3]
    one.expect(third, None, is_kept=True)
    with torch.no_grad():
        assert run() == [2, 3]
    assert (run(), run()) == ([1, 3], [2, 3])
    # Nothing is computed again: the pass itself has gradients.
    one.expect(first, None, is_kept=True)
    assert run() == [0, 3]
    one.forget()
    assert run() == [0, 1], "its own choice"


def test_a_bias_on_softmax_scores_changes_the_choice_alone() -> None:
    """As in Ernie 4.5, with replay and without. Scores are 0.64, 0.24, 0.09 and 0.03."""
    bias, logits = torch.tensor([0.0, -0.2, 0.0, 0.1]), torch.arange(4.0, 0.0, -1)[None]
    replay = router()
    for chooser in (None, replay):
        biased: Any = SimpleNamespace(expert_bias=bias, replay=chooser)
        choice = BiasedChoice(biased)
        values, experts = choice.get_replay_topk(logits, 2, None, None, top_k)
        assert experts.tolist() == [[0, 3]] and values.tolist() == [[4.0, 1.0]]
    replay.expect(torch.tensor([[1, 2]]), torch.ones(1), is_kept=False)
    values, experts = choice.get_replay_topk(logits, 2, None, None, top_k)
    assert experts.tolist() == [[1, 2]] and values.tolist() == [[3.0, 2.0]]
    assert counted(replay.counts[None])["moe/routes_differ"] == 1.0


def test_what_is_counted_of_choices() -> None:
    one = router()
    scores = torch.tensor(
        [[2.0, 1.0, 0.0, 0.0], [2.0, 1.0, 0.0, 0.0], [0.0, 0.0, 5.0, 5.0]]
    )
    one.expect(
        torch.tensor([[1, 0], [0, 3], [-1, -1]]),
        torch.tensor([1.0, 1.0, 1.0]),
        is_kept=False,
    )
    with torch.no_grad():
        one.get_replay_topk(scores, 2, default_compute_topk=top_k)
    found = counted(one.counts[None])
    shares = scores.double().softmax(-1)
    assert found == pytest.approx(
        {
            "moe/load_max": 2 / 1.5,  # experts 0 to 3 have 2, 1, 1, 2 of six
            "moe/overflow": 1.0 / 6,
            "moe/idle_experts": 0.0,
            "moe/router_entropy": float(-(shares * shares.log()).sum(-1).mean()),
            # Of the two that were told; the same ones in another order are no
            # difference.
            "moe/routes_differ": 0.5,
        }
    )
    before = copy.deepcopy(one.counts)
    one.expect(None, None, is_kept=False)
    with torch.no_grad():
        one.get_replay_topk(scores, 2, default_compute_topk=top_k)
    assert torch.equal(one.counts, before) and counted(torch.zeros(2, 8)) == {}
