"""An update of a draft head is the one that loops over positions, the papers' steps and autograd give in float64."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megaverl.models.tiny import make_tiny_folder
from tests.draft_heads import make_heads
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


class Eagle3:
    """The paper's head: its layer reads an embedding and a state side by side."""

    prefix = "layers.0."

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.w = weights

    def first_state(self, aux: Tensor) -> Tensor:
        return self.w["fc.weight"] @ aux

    def inputs(self, embedding: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """(of attention, of the residual connection)."""
        x = norm(embedding, self.w["layers.0.input_layernorm.weight"])
        y = norm(state, self.w["layers.0.hidden_norm.weight"])
        return torch.cat([x, y]), state

    def outputs(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """(logits, state of the next step)."""
        return self.w["lm_head.weight"] @ norm(state, self.w["norm.weight"]), state


class Mtp:
    """The layer reads a projection of embedding and state; logits are the actor's of its normed output."""

    prefix = "model.mtp_layers.0."

    def __init__(self, weights: dict[str, Tensor], output: Tensor) -> None:
        self.w = {name.removeprefix(self.prefix): w for name, w in weights.items()}
        self.output = output

    def first_state(self, aux: Tensor) -> Tensor:
        return aux

    def inputs(self, embedding: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        x = norm(state, self.w["hidden_layernorm.weight"])
        y = norm(embedding, self.w["token_layernorm.weight"])
        projected = self.w["input_proj.weight"] @ torch.cat([x, y])
        return norm(projected, self.w["input_layernorm.weight"]), projected

    def outputs(self, state: Tensor) -> tuple[Tensor, Tensor]:
        normed = norm(state, self.w["final_layernorm.weight"])
        return self.output @ normed, normed


def steps_at(
    head: Eagle3 | Mtp, weights: dict[str, Tensor], aux: Tensor, embeddings: Tensor
) -> list[list[Tensor]]:
    """The logits of each step at each position of one sample, [steps][positions]."""
    layer = {
        name.removeprefix(head.prefix): weight
        for name, weight in weights.items()
        if name.startswith(head.prefix)
    }

    def projected(name: str, x: Tensor, heads: int) -> Tensor:
        bias = layer.get(f"self_attn.{name}_proj.bias", 0.0)
        return (layer[f"self_attn.{name}_proj.weight"] @ x + bias).view(heads, -1)

    found: list[list[Tensor]] = []
    columns: list[list[tuple[Tensor, Tensor]]] = []
    states = [head.first_state(row) for row in aux]
    for step in range(STEPS):
        # Positions whose next tokens exist.
        inputs = [
            head.inputs(embeddings[place + 1 + step], states[place])
            for place in range(len(aux) - 1 - step)
        ]
        columns.append(
            [
                (
                    rotated(projected("k", x, KV_HEADS), place + step),
                    projected("v", x, KV_HEADS),
                )
                for place, (x, _) in enumerate(inputs)
            ]
        )
        states, found_here = [], []
        for place, (x, state) in enumerate(inputs):
            query = rotated(projected("q", x, HEADS), place + step)
            # Tokens that the first step has seen, and the drafts of this position.
            seen = columns[0][: place + 1] + [column[place] for column in columns[1:]]
            attention = attended(query, [k for k, _ in seen], [v for _, v in seen])
            state = state + layer["self_attn.o_proj.weight"] @ attention
            normed = norm(state, layer["post_attention_layernorm.weight"])
            gate, up = (
                layer[f"mlp.{name}_proj.weight"] @ normed for name in ("gate", "up")
            )
            state = state + layer["mlp.down_proj.weight"] @ (
                torch.nn.functional.silu(gate) * up
            )
            logits, following = head.outputs(state)
            states.append(following)
            found_here.append(logits)
        found.append(found_here)
    return found


def by_loops(
    folder: Path, head_folder: Path, layers: list[int]
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """(metrics, weights) after the updates. An MTP head reads no layers, but the state after the last norm."""
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
        for name, weight in load_file(head_folder / "model.safetensors").items()
    }
    output = actor.lm_head.weight.detach()
    head = Eagle3(weights) if layers else Mtp(weights, output)
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
                last = actor.model(tokens[None]).last_hidden_state[0]
                embeddings = actor.model.embed_tokens(tokens)
                aux = torch.cat(
                    [kept[number][0] for number in layers] or [last], dim=-1
                )
                if not layers:
                    # vLLM hides the token at position 0 from an MTP head.
                    embeddings[1] = 0.0
            for step, logits in enumerate(steps_at(head, weights, aux, embeddings)):
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
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    """A model and untrained heads of it, whose weights are large enough that each has a gradient."""
    root = tmp_path_factory.mktemp("heads")
    # The actor's output layer, which the MTP head uses, is tied.
    model = make_tiny_folder(
        root / "model", "Qwen3ForCausalLM", initializer_range=0.15, tie_embeddings=True
    )
    heads = make_heads(root, model, spread=0.2)
    return model, heads


@pytest.mark.parametrize(("method", "layers"), [("eagle3", [2, 3, 4]), ("mtp", [])])
def test_an_update_is_that_of_the_papers_steps_and_autograd(
    launch: Launcher,
    folders: tuple[Path, dict[str, Path]],
    tmp_path: Path,
    method: str,
    layers: list[int],
) -> None:
    """... on every grid, whichever engine the actor has."""
    folder, heads = folders
    head = heads[method]
    expected = by_loops(folder, head, layers)
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
