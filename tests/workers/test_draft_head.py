"""An update of an EAGLE-3 head is the one that loops over positions, the paper's steps and autograd give in float64."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megaverl.models.draft_head import make_draft_head
from megaverl.models.tiny import make_tiny_folder
from tests.launcher import Launcher
from tests.workers.ranks import experience
from tests.workers.test_against_transformers import TEMPERATURE, assert_right

STEPS, EPOCHS, DECAY = 3, 2, 0.8
HEADS, KV_HEADS, SIZE = 4, 2, 8
# (grid, options of the actor and of the head)
CASES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "megatron tp2": ({"tp": 2}, {"fsdp": None}),
    "sequence parallel": (
        {"tp": 2},
        {"fsdp": None, "megatron": {"sequence_parallel": True}},
    ),
    "megatron dp2": ({"dp": 2}, {"fsdp": None, "micro_batch_tokens": 30}),
    "fsdp tp2": ({"tp": 2}, {"fsdp": {}}),
    "fsdp dp2": ({"dp": 2}, {"fsdp": {}, "activation_checkpointing": "full"}),
}


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean() + 1e-5).sqrt()


def rotated(x: Tensor, position: int) -> Tensor:
    """[heads, size] rotated by its position: pairs of dimension j and j + size / 2."""
    angles = position / 10000.0 ** (torch.arange(0, SIZE, 2).double() / SIZE)
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attended(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """[heads * size], with two query heads for each of the keys' heads."""
    outputs = []
    for head, row in enumerate(query):
        of = head * KV_HEADS // HEADS
        scores = torch.stack([row @ key[of] / math.sqrt(SIZE) for key in keys])
        weights = scores.softmax(0)
        outputs.append(
            sum(w * value[of] for w, value in zip(weights, values, strict=True))
        )
    return torch.cat(outputs)


def steps_at(
    w: dict[str, Tensor], aux: Tensor, embeddings: Tensor
) -> list[list[Tensor]]:
    """The logits of each step at each position of one sample, [steps][positions]."""
    layer = "layers.0."
    found: list[list[Tensor]] = []
    columns: list[list[tuple[Tensor, Tensor]]] = []
    states = [w["fc.weight"] @ row for row in aux]
    for step in range(STEPS):
        inputs, found_here = [], []
        # Positions whose next tokens exist.
        for place in range(len(aux) - 1 - step):
            embedding = norm(
                embeddings[place + 1 + step], w[layer + "input_layernorm.weight"]
            )
            state = norm(states[place], w[layer + "hidden_norm.weight"])
            inputs.append(torch.cat([embedding, state]))
        columns.append(
            [
                (
                    rotated(
                        (w[layer + "self_attn.k_proj.weight"] @ x).view(KV_HEADS, -1),
                        place + step,
                    ),
                    (w[layer + "self_attn.v_proj.weight"] @ x).view(KV_HEADS, -1),
                )
                for place, x in enumerate(inputs)
            ]
        )
        following = []
        for place, x in enumerate(inputs):
            query = rotated(
                (w[layer + "self_attn.q_proj.weight"] @ x).view(HEADS, -1), place + step
            )
            # Tokens that the first step has seen, and the drafts of this position.
            seen = columns[0][: place + 1] + [column[place] for column in columns[1:]]
            attention = attended(query, [k for k, _ in seen], [v for _, v in seen])
            state = states[place] + w[layer + "self_attn.o_proj.weight"] @ attention
            normed = norm(state, w[layer + "post_attention_layernorm.weight"])
            gate, up = (
                w[f"{layer}mlp.{name}_proj.weight"] @ normed for name in ("gate", "up")
            )
            state = state + w[layer + "mlp.down_proj.weight"] @ (
                torch.nn.functional.silu(gate) * up
            )
            following.append(state)
            found_here.append(w["lm_head.weight"] @ norm(state, w["norm.weight"]))
        states = following
        found.append(found_here)
    return found


def by_loops(
    folder: Path, head: Path, layers: list[int]
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """(metrics, weights) after the updates."""
    actor = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    kept: dict[int, Tensor] = {}
    for number, layer in enumerate(actor.model.layers):
        layer.register_forward_hook(
            lambda module, args, output, number=number: kept.update(
                {number + 1: output}
            )
        )
    weights = {
        name: weight.double().requires_grad_()
        for name, weight in load_file(head / "model.safetensors").items()
    }
    optimizer = torch.optim.Adam(weights.values(), lr=0.1, eps=1.0)
    batch = experience()
    losses, norms = [], []
    for _ in range(EPOCHS):
        total = torch.zeros((), dtype=torch.float64)
        for row in range(len(batch)):
            prompt = int(batch.prompt_lengths[row])
            response = int(batch.response_mask[row].sum())
            tokens = torch.cat(
                [batch.input_ids[row, :prompt], batch.generated_ids[row, :response]]
            )
            with torch.no_grad():
                actor(tokens[None])
                embeddings = actor.model.embed_tokens(tokens)
                aux = torch.cat([kept[number][0] for number in layers], dim=-1)
            for step, logits in enumerate(steps_at(weights, aux, embeddings)):
                for place, row_logits in enumerate(logits):
                    # Position i of step k predicts token i + k + 2. The engine's first
                    # position is the prompt's last token.
                    target = place + step + 2
                    if place >= prompt - 1 and target < len(tokens):
                        log_q = (row_logits / TEMPERATURE).log_softmax(0)
                        total = total - DECAY**step * log_q[tokens[target]]
        scale = sum(DECAY**step for step in range(STEPS))
        loss = total / scale / int(batch.response_mask.sum())
        optimizer.zero_grad()
        loss.backward()
        losses.append(float(loss))
        norms.append(float(torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)))
        optimizer.step()
    metrics = {"loss": sum(losses) / EPOCHS, "grad_norm": sum(norms) / EPOCHS}
    return metrics, {name: weight.detach() for name, weight in weights.items()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model and an untrained head of it, whose weights are large enough that each has a gradient."""
    root = tmp_path_factory.mktemp("heads")
    model = make_tiny_folder(root / "model", "Qwen3ForCausalLM", initializer_range=0.15)
    return model, make_draft_head(root / "head", model)


def test_an_update_is_that_of_the_papers_steps_and_autograd(
    launch: Launcher, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """... on every grid, whichever engine the actor has."""
    folder, head = folders
    expected = by_loops(folder, head, [2, 3, 4])
    before = load_file(head / "model.safetensors")
    for name, (shape, options) in CASES.items():
        given = {"micro_batch_tokens": 64, **options}
        [metrics, _] = launch.world(
            2,
            "tests.workers.draft_head_ranks:update_head",
            folder=folder,
            head=head,
            output=tmp_path / name,
            shape=shape,
            num_steps=STEPS,
            num_epochs=EPOCHS,
            **given,
        )
        weights = load_file(tmp_path / name / "model.safetensors")
        assert_right((metrics, weights), expected, before, name)
