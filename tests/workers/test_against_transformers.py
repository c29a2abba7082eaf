"""An update on any grid is the one that transformers' forward pass, the paper's loss and autograd give in float64."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megaverl.data.batch import RolloutBatch
from megaverl.models.tiny import make_tiny_folder
from tests.launcher import Launcher
from tests.references import load_reference
from tests.sharding.specs import NEMOTRON_EXPERTS, TRANSFORMERS_ATTENTION
from tests.workers.ranks import experience
from tests.workers.test_parallel_invariance import updated

SHAPES: dict[str, dict[str, int]] = {
    "one": {},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "dp2": {"dp": 2},
    "cp2": {"cp": 2},
}
EXPERTS: dict[str, dict[str, int]] = {
    "tp2": {"tp": 2},
    "dp2 ep2": {"dp": 2, "ep": 2},
    "cp2 ep2": {"cp": 2, "ep": 2},
}
# experts with biases are not cut
BIASED: dict[str, dict[str, int]] = {
    "tp2": {"tp": 2, "etp": 1},
    "pp2": {"pp": 2},
    "dp2 ep2": {"dp": 2, "ep": 2},
}
# From the second on, Adam has a state, and the critic's head is no longer zero.
EPOCHS = 3
# KL and temperature as of `tests.workers.ranks.update`.
CLIP, KL, ENTROPY, TEMPERATURE = 0.2, 0.1, 0.01, 0.8
COMMON = {"num_epochs": EPOCHS, "clip_range": CLIP}
PPO = {
    "name": "ppo",
    "loss_aggregation": "token_mean",
    "entropy_coef": ENTROPY,
    **COMMON,
}
GRPO = {
    "name": "grpo",
    "loss_aggregation": "seq_mean_token_mean",
    "kl": {"in": "loss", "kind": "k3"},
    **COMMON,
}
CRITIC = {
    "name": "ppo",
    "critic": True,
    "value_clip_range": CLIP,
    "value_loss_coef": 0.5,
    "num_epochs": EPOCHS,
}

Loss = Callable[[torch.nn.Module, RolloutBatch], Tensor]


def responses(
    model: torch.nn.Module, batch: RolloutBatch
) -> list[tuple[Tensor, Tensor, slice, Any]]:
    """Of each sample its last hidden states and tokens, where its response lies, and its row of every tensor."""
    found = []
    for row in range(len(batch)):
        fields = {name: tensor[row] for name, tensor in batch.tensors.items()}
        prompt, response = (
            int(fields["prompt_lengths"]),
            int(fields["response_mask"].sum()),
        )
        tokens = torch.cat(
            [fields["input_ids"][:prompt], fields["generated_ids"][:response]]
        )
        hidden = model.model(tokens[None]).last_hidden_state[0]
        here = {
            name: tensor[:response].double()
            for name, tensor in fields.items()
            if tensor.dim()
        }
        found.append((hidden[prompt - 1 : -1], tokens[prompt:], here))
    return found


def policy_tokens(
    model: torch.nn.Module, batch: RolloutBatch
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of each response, by token: PPO's surrogate (arXiv 1707.06347, eq. 7), entropy, and the k3 estimate of the KL."""
    found = []
    for hidden, tokens, fields in responses(model, batch):
        # Granite's key divides logits, the others multiply them.
        scale = getattr(model.config, "logit_scale", 1.0)
        scale = scale / getattr(model.config, "logits_scaling", 1.0)
        scale = scale * getattr(model.config, "lm_head_multiplier", 1.0)
        logits = model.lm_head(hidden) * scale
        softcap = getattr(model.config, "final_logit_softcapping", None)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        log_p = torch.log_softmax(logits / TEMPERATURE, dim=-1)
        chosen = log_p.gather(1, tokens[:, None])[:, 0]
        ratio, advantages = (
            (chosen - fields["old_log_probs"]).exp(),
            fields["advantages"],
        )
        surrogate = torch.minimum(
            ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages
        )
        reference = fields["ref_log_probs"] - chosen
        found.append(
            (surrogate, -(log_p.exp() * log_p).sum(-1), reference.exp() - reference - 1)
        )
    return found


def ppo(model: torch.nn.Module, batch: RolloutBatch) -> Tensor:
    """The mean over all tokens, with the entropy bonus of its eq. 9."""
    surrogate, entropy, _ = (
        torch.cat(parts) for parts in zip(*policy_tokens(model, batch), strict=True)
    )
    return -(surrogate + ENTROPY * entropy).mean()


def grpo(model: torch.nn.Module, batch: RolloutBatch) -> Tensor:
    """arXiv 2402.03300, eq. 3: the mean over responses of the mean over their tokens, less the KL."""
    each = [
        (surrogate - KL * kl).mean() for surrogate, _, kl in policy_tokens(model, batch)
    ]
    return -torch.stack(each).mean()


def value_error(model: torch.nn.Module, batch: RolloutBatch) -> Tensor:
    """arXiv 2005.12729, section 3: the larger squared error of the value and of the value held near the old one."""
    each = []
    for hidden, _, fields in responses(model, batch):
        values, old, returns = (
            model.score(hidden)[:, 0],
            fields["values"],
            fields["returns"],
        )
        held = old + (values - old).clamp(-CLIP, CLIP)
        each.append(torch.maximum((values - returns) ** 2, (held - returns) ** 2))
    return 0.5 * 0.5 * torch.cat(each).mean()


def by_transformers(
    folder: Path, loss_of: Loss, **samples: Any
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """(metrics, weights) after the updates on such samples (`experience`)."""
    model = load_reference(folder, dtype=torch.float64, experts_implementation="eager")
    if attention := TRANSFORMERS_ATTENTION.get(type(model).__name__):
        model.set_attn_implementation(attention)
    if loss_of is value_error:
        model.score = torch.nn.Linear(
            model.config.hidden_size, 1, bias=False, dtype=torch.float64
        )
        torch.nn.init.zeros_(model.score.weight)
        model.lm_head = None
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, eps=1.0)
    losses, norms = [], []
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        loss = loss_of(model, experience(**samples))
        loss.backward()
        losses.append(float(loss))
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
    metrics = {"loss": sum(losses) / EPOCHS, "grad_norm": sum(norms) / EPOCHS}
    return metrics, dict(one_by_one(model))


# Granite MoE's modules have other names than its files.
STORED_NAMES = {
    "experts.gate_up_proj": "input_linear.weight",
    "experts.down_proj": "output_linear.weight",
    "router.weight": "router.layer.weight",
}


def one_by_one(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Weights as their files have them: each expert's matrices, which transformers holds stacked."""
    for name, weight in model.named_parameters():
        # A parameter in Ernie 4.5 alone, and without a gradient.
        if name.endswith("e_score_correction_bias"):
            continue
        if model.config.model_type == "granitemoe":
            before, block, inside = name.rpartition("block_sparse_moe.")
            yield before + block + STORED_NAMES.get(inside, inside), weight.detach()
            continue
        if model.config.model_type == "nemotron_h":
            name = re.sub("^model", "backbone", name)
        stem, _, kind = name.rpartition(".")
        # Whose files stack them too.
        stacked_in_files = ("gpt_oss", "llama4_text")
        if not stem.endswith(".experts") or model.config.model_type in stacked_in_files:
            yield name, weight.detach()
            continue
        for number, stacked in enumerate(weight.detach()):
            for part, matrix in zip(
                kind.removesuffix("_proj").split("_"),
                stacked.chunk(1 + kind.count("_up")),
                strict=True,
            ):
                yield f"{stem}.{number}.{part}_proj.weight", matrix


@pytest.mark.parametrize(
    ("options", "loss"),
    [(PPO, ppo), (GRPO, grpo), (CRITIC, value_error)],
    ids=["PPO", "GRPO", "critic"],
)
@pytest.mark.parametrize(
    ("architecture", "shapes"),
    [
        ("Qwen3ForCausalLM", SHAPES),
        ("Qwen3MoeForCausalLM", EXPERTS),
        ("GptOssForCausalLM", BIASED),
    ],
    ids=["dense", "moe", "gpt-oss"],
)
def test_an_update_is_that_of_transformers_and_autograd(
    launch: Launcher,
    tmp_path: Path,
    architecture: str,
    shapes: dict[str, dict[str, int]],
    options: dict[str, Any],
    loss: Loss,
) -> None:
    # large weights, where no norm makes queries and keys large: else their gradients
    # are too small to compare
    large = {"initializer_range": 0.15} if architecture == "GptOssForCausalLM" else {}
    tied = architecture == "Qwen3ForCausalLM"
    folder = make_tiny_folder(
        tmp_path / "model", architecture, tie_embeddings=tied, **large
    )
    expected = by_transformers(folder, loss)
    before = load_file(folder / "model.safetensors")
    for name, shape in shapes.items():
        assert_right(
            updated(launch, folder, tmp_path / name, shape, **options),
            expected,
            before,
            name,
        )


# What some architectures have and others lack: norms after, rotated pairs and gates
# fused in files; all projections fused; layers without rotary embeddings; a shared
# expert with a gate; scaled layers; scaled layers with all experts in one array; layer
# norms, biases and no gates; norms over all heads; soft caps; two rotary bases; one norm
# for attention and MLP; norms after the rotary embedding; a bias on a router's softmax
# scores; biases of queries, keys and values alone; partly rotated heads, groups of
# experts and other names; gated delta nets and gates on attention's outputs; Mamba
# layers, and layers of one part each; Mamba layers beside attention, with their scales; chunks,
# scaled queries and scaled inputs of experts.
SPECIAL: dict[str, list[dict[str, int]]] = {
    "Glm4ForCausalLM": [{"tp": 2}, {"cp": 2}],
    "Phi3ForCausalLM": [{"tp": 2}],
    "SmolLM3ForCausalLM": [{"pp": 2}],
    "Qwen2MoeForCausalLM": [{"tp": 2}, {"dp": 2, "ep": 2}],
    "GraniteForCausalLM": [{"tp": 2}],
    "GraniteMoeForCausalLM": [{"tp": 2}, {"pp": 2}, {"dp": 2, "ep": 2}],
    "Starcoder2ForCausalLM": [{"tp": 2}],
    "Olmo2ForCausalLM": [{"tp": 2}],
    # With sequence parallelism.
    "OlmoeForCausalLM": [{"tp": 2}],
    "Gemma2ForCausalLM": [{"tp": 2}, {"cp": 2}],
    "Gemma3ForCausalLM": [{"tp": 2}, {"cp": 2}],
    "Cohere2ForCausalLM": [{"tp": 2}, {"pp": 2}],
    "HunYuanDenseV1ForCausalLM": [{"tp": 2}, {"cp": 2}],
    "Ernie4_5_MoeForCausalLM": [{"tp": 2}, {"dp": 2, "ep": 2}],
    "InternLM3ForCausalLM": [{"tp": 2}],
    "BailingMoeV2ForCausalLM": [{"tp": 2}, {"pp": 2}, {"dp": 2, "ep": 2}],
    "Qwen3NextForCausalLM": [{"tp": 2}, {"pp": 2}, {"dp": 2, "ep": 2}, {"cp": 2}],
    "Qwen3_5ForCausalLM": [{"tp": 2}, {"tp": 2, "cp": 2}],
    "Qwen3_5MoeForCausalLM": [{"tp": 2}, {"pp": 2}, {"dp": 2, "ep": 2}],
    "NemotronHForCausalLM": [{"tp": 2}, {"pp": 2}, {"cp": 2}],
    # Four ranks share two groups, and two context-parallel ones a rank's group.
    "FalconH1ForCausalLM": [
        {"tp": 2},
        {"pp": 2},
        {"tp": 4},
        {"tp": 2, "cp": 2},
        {"tp": 4, "cp": 2},
    ],
    "Llama4ForCausalLM": [
        {"tp": 2},
        {"pp": 2},
        {"cp": 2},
        {"dp": 2, "ep": 2},
        {"tp": 2, "dp": 2, "ep": 2, "etp": 1},
    ],
}


@pytest.mark.parametrize("architecture", SPECIAL)
def test_an_update_of_parts_that_few_architectures_have(
    launch: Launcher, tmp_path: Path, architecture: str
) -> None:
    folder = make_tiny_folder(tmp_path / "model", architecture, initializer_range=0.15)
    expected = by_transformers(folder, ppo)
    before = load_file(folder / "model.safetensors")
    for shape in SPECIAL[architecture]:
        assert_right(
            updated(launch, folder, tmp_path / str(shape), shape, **PPO),
            expected,
            before,
            str(shape),
        )


def test_an_update_of_layers_of_experts_alone(launch: Launcher, tmp_path: Path) -> None:
    folder = make_tiny_folder(
        tmp_path / "model",
        "NemotronHForCausalLM",
        initializer_range=0.15,
        **NEMOTRON_EXPERTS,
    )
    expected = by_transformers(folder, ppo)
    before = load_file(folder / "model.safetensors")
    for shape in ({"tp": 2}, {"pp": 2}, {"dp": 2, "ep": 2}):
        found = updated(launch, folder, tmp_path / str(shape), shape, **PPO)
        assert_right(found, expected, before, str(shape))


def assert_right(
    found: tuple[dict[str, float], dict[str, Tensor]],
    expected: tuple[dict[str, float], dict[str, Tensor]],
    before: dict[str, Tensor],
    name: str,
) -> None:
    """Both are (metrics, weights) after updates of the weights `before`."""
    metrics, weights = found
    assert {key: metrics[key] for key in expected[0]} == pytest.approx(
        expected[0], rel=1e-4
    )
    # the router's biases are no parameters
    assert {
        key
        for key in weights
        if not key.endswith(("e_score_correction_bias", "expert_bias"))
    } == expected[1].keys()
    for key, right in expected[1].items():
        moved = float((right - before.get(key, 0)).abs().max())
        wrong = float((weights[key] - right).abs().max())
        # float32 has 6e-8 at 1.
        assert moved > 3e-7 and wrong < 2e-3 * moved + 2e-7, (name, key, wrong, moved)


@pytest.mark.parametrize(("options", "loss"), [(GRPO, grpo), (CRITIC, value_error)])
def test_conversations_that_share_turns_are_updated_on_as_if_each_were_alone(
    launch: Launcher, tmp_path: Path, options: dict[str, Any], loss: Loss
) -> None:
    """By both engines, whether tokens of several turns are in the row once or in rows of their own."""
    folder = make_tiny_folder(tmp_path / "model", "Qwen3ForCausalLM")
    samples = {"same_prompts": 6, "branches": True}
    expected = by_transformers(folder, loss, **samples)
    before = load_file(folder / "model.safetensors")
    grids: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
        "one": ({}, {}),
        "ranks": ({"tp": 2, "pp": 2}, {}),
        "context": ({"cp": 2}, {}),
        "replicas": ({"dp": 2}, {"micro_batch_tokens": 40}),
        "padded": ({}, {"pack_samples": False}),
        "shards": ({"dp": 2}, {"fsdp": {}}),
    }
    for name, (shape, changes) in grids.items():
        given = {**samples, **options, **changes}
        made = updated(launch, folder, tmp_path / name, shape, **given)
        assert_right(made, expected, before, name)


# Layers with a state, and attention that depends on a token's position in its sample;
# and how their updates are computed.
STATES: dict[str, dict[str, tuple[dict[str, int], dict[str, Any]]]] = {
    "Qwen3NextForCausalLM": {
        "packed": ({}, {"activation_checkpointing": "full"}),
        "padded": ({}, {"pack_samples": False}),
        "context": ({"cp": 2}, {"activation_checkpointing": "full"}),
        "context, padded": ({"cp": 2}, {"pack_samples": False}),
    },
    "NemotronHForCausalLM": {
        "one": ({}, {}),
        "sequence parallel": ({"tp": 2}, {"megatron": {"sequence_parallel": True}}),
        "virtual stages": ({"pp": 2, "vpp": 2}, {}),
        "padded": ({}, {"pack_samples": False}),
        "recomputed": ({"dp": 2}, {"activation_checkpointing": "full"}),
        "parts recomputed": ({}, {"activation_checkpointing": "selective"}),
        "shards": ({"dp": 2}, {"fsdp": {}}),
        "context": ({"tp": 2, "cp": 2}, {"megatron": {"sequence_parallel": True}}),
    },
    "FalconH1ForCausalLM": {
        "one": ({}, {}),
        "one group": ({"tp": 2}, {"megatron": {"sequence_parallel": True}}),
        "virtual stages": ({"pp": 2, "vpp": 2}, {}),
        "padded": ({}, {"pack_samples": False}),
        "recomputed": ({"dp": 2}, {"activation_checkpointing": "full"}),
        "shards": ({"dp": 2}, {"fsdp": {}}),
        "context": ({"cp": 2}, {"activation_checkpointing": "full"}),
        "context, padded": ({"cp": 2}, {"pack_samples": False}),
    },
    "Llama4ForCausalLM": {
        "one": ({}, {}),
        "context": ({"cp": 2}, {}),
        "context, padded": ({"cp": 2}, {"pack_samples": False}),
        "virtual stages": ({"pp": 2, "vpp": 2}, {}),
        "padded": ({}, {"pack_samples": False}),
        "recomputed": ({"dp": 2}, {"activation_checkpointing": "full"}),
        "parts recomputed": ({"tp": 2}, {"activation_checkpointing": "selective"}),
        "shards": ({"dp": 2}, {"fsdp": {}}),
    },
}
# No response ends at a multiple of Mamba layers' chunks. The second model has no norm
# over the gated output.
STATE_SIZES: dict[str, dict[str, Any]] = {
    "NemotronHForCausalLM": {"chunk_size": 7},
    "FalconH1ForCausalLM": {
        "mamba_chunk_size": 7,
        "mamba_n_groups": 1,
        "mamba_rms_norm": False,
        # Else the decays move by less than float32 tells apart.
        "initializer_range": 0.3,
    },
}


@pytest.mark.parametrize("architecture", STATES)
def test_samples_of_a_packed_row_start_without_a_state(
    launch: Launcher, tmp_path: Path, architecture: str
) -> None:
    """For prompts and turns that samples share: no state, chunk or factor continues that of another sample."""
    more = {"initializer_range": 0.15} | STATE_SIZES.get(architecture, {})
    folder = make_tiny_folder(tmp_path / "model", architecture, **more)
    samples = {"same_prompts": 6, "branches": True}
    expected = by_transformers(folder, grpo, **samples)
    before = load_file(folder / "model.safetensors")
    for name, (shape, changes) in STATES[architecture].items():
        given = {**samples, **GRPO, **changes}
        made = updated(launch, folder, tmp_path / name, shape, **given)
        assert_right(made, expected, before, name)


# (ranks, how they are cut, what else): all strategies, uneven and empty shards,
# checkpointing, chunks of logits
CUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one": (1, {}, {}),
    "full": (2, {}, {"activation_checkpointing": "full", "chunked_logits": True}),
    "compiled": (1, {"compile": True}, {}),
    "padded": (
        2,
        {"sharding_strategy": "shard_grad_op"},
        {"pack_samples": False, "micro_batch_tokens": 30},
    ),
    "no shard": (
        2,
        {"sharding_strategy": "no_shard", "attention": "sdpa"},
        {"micro_batch_tokens": 30},
    ),
    "hybrid": (
        4,
        {"sharding_strategy": "hybrid_shard", "shard_size": 2},
        {"micro_batch_tokens": 30},
    ),
    "four": (
        4,
        {"cpu_offload": True},
        {"activation_checkpointing": "selective", "micro_batch_tokens": 30},
    ),
}
GEMMA3 = {
    "sliding_window": 4,  # responses are longer
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "query_pre_attn_scalar": 8,
    "num_key_value_heads": 1,
}


@pytest.mark.parametrize(
    ("architecture", "options", "loss", "cuts"),
    [
        ("Qwen2ForCausalLM", PPO, ppo, list(CUTS)),
        ("LlamaForCausalLM", CRITIC, value_error, ["full"]),
        ("Gemma2ForCausalLM", PPO, ppo, ["full", "padded"]),
        ("Gemma3ForCausalLM", GRPO, grpo, ["full", "padded"]),
        ("Qwen3ForCausalLM", PPO, ppo, ["compiled"]),
        ("Qwen3MoeForCausalLM", GRPO, grpo, ["no shard", "full"]),
        # Rows are padded, as transformers carries states on in a packed row.
        ("Qwen3NextForCausalLM", PPO, ppo, ["full"]),
    ],
)
def test_an_update_under_fsdp_is_that_of_transformers_and_autograd(
    launch: Launcher,
    tmp_path: Path,
    architecture: str,
    options: dict[str, Any],
    loss: Loss,
    cuts: list[str],
) -> None:
    more: dict[str, Any] = GEMMA3 if "Gemma3" in architecture else {}
    if architecture == "Qwen3NextForCausalLM":
        # Else the decays move by less than float32 tells apart.
        more = {"initializer_range": 0.15}
    tied = architecture in ("Qwen2ForCausalLM", "Gemma3ForCausalLM")
    folder = make_tiny_folder(
        tmp_path / "model", architecture, tie_embeddings=tied, **more
    )
    expected = by_transformers(folder, loss, same_prompts=3)
    before = load_file(folder / "model.safetensors")
    for name in cuts:
        ranks, fsdp, changes = CUTS[name]
        given = {"same_prompts": 3, **options, **changes, "fsdp": fsdp}
        assert_right(
            updated(launch, folder, tmp_path / name, {"dp": ranks}, **given),
            expected,
            before,
            name,
        )


REPLICAS = {"sharding_strategy": "hybrid_shard", "shard_size": 2}
# (architecture, its config, options, loss, how ranks are cut, what else), on two
# tensor-parallel ranks by two shards
TENSOR_PARALLEL: dict[
    str,
    tuple[str, dict[str, Any], dict[str, Any], Loss, dict[str, Any], dict[str, Any]],
] = {
    "biases, tied": ("Qwen2ForCausalLM", {}, PPO, ppo, {}, {"chunked_logits": True}),
    "norms of heads": (
        "Gemma3ForCausalLM",
        GEMMA3 | {"num_key_value_heads": 2},
        GRPO,
        grpo,
        {},
        CUTS["full"][2],
    ),
    "replicas": (
        "LlamaForCausalLM",
        {},
        PPO,
        ppo,
        REPLICAS,
        {"micro_batch_tokens": 30},
    ),
}


@pytest.mark.parametrize("case", TENSOR_PARALLEL)
def test_an_update_under_fsdp_with_tensor_parallel_ranks(
    launch: Launcher, tmp_path: Path, case: str
) -> None:
    architecture, more, options, loss, fsdp, changes = TENSOR_PARALLEL[case]
    tied = architecture != "LlamaForCausalLM"
    folder = make_tiny_folder(
        tmp_path / "model", architecture, tie_embeddings=tied, **more
    )
    expected = by_transformers(folder, loss, same_prompts=3)
    before = load_file(folder / "model.safetensors")
    given = {"same_prompts": 3, **options, **changes, "fsdp": fsdp}
    found = updated(
        launch, folder, tmp_path / "found", {"tp": 2, "dp": 4 if fsdp else 2}, **given
    )
    assert_right(found, expected, before, case)


# (architecture, its config, options, loss, grid, how ranks are cut, what else), with
# rows cut over two ranks: packed rows that share prompts, with and without a window;
# padded rows; replicas of two ranks; and beside tensor-parallel ranks
CONTEXT_PARALLEL: dict[
    str, tuple[str, dict[str, Any], dict[str, Any], Any, Any, Any, Any]
] = {
    "packed": ("Qwen2ForCausalLM", {}, PPO, ppo, {"cp": 2}, {}, {}),
    "window": (
        "Gemma3ForCausalLM",
        GEMMA3,
        GRPO,
        grpo,
        {"cp": 2},
        {},
        CUTS["full"][2],
    ),
    "padded": (
        "LlamaForCausalLM",
        {},
        CRITIC,
        value_error,
        {"cp": 2},
        {"sharding_strategy": "no_shard"},
        {"pack_samples": False, "micro_batch_tokens": 30},
    ),
    "replicas": (
        "Qwen3ForCausalLM",
        {},
        PPO,
        ppo,
        {"cp": 2, "dp": 2},
        REPLICAS,
        {"micro_batch_tokens": 30, "chunked_logits": True},
    ),
    "beside tp": ("Qwen2ForCausalLM", {}, PPO, ppo, {"tp": 2, "cp": 2}, {}, {}),
}


@pytest.mark.parametrize("case", CONTEXT_PARALLEL)
def test_an_update_under_fsdp_with_context_parallel_ranks(
    launch: Launcher, tmp_path: Path, case: str
) -> None:
    architecture, more, options, loss, shape, fsdp, changes = CONTEXT_PARALLEL[case]
    tied = architecture in ("Qwen2ForCausalLM", "Gemma3ForCausalLM")
    folder = make_tiny_folder(
        tmp_path / "model", architecture, tie_embeddings=tied, **more
    )
    expected = by_transformers(folder, loss, same_prompts=3)
    before = load_file(folder / "model.safetensors")
    given = {"same_prompts": 3, **options, **changes, "fsdp": fsdp}
    found = updated(launch, folder, tmp_path / "found", shape, **given)
    assert_right(found, expected, before, case)


def test_both_engines_and_transformers_alone_agree(
    launch: Launcher, tmp_path: Path
) -> None:
    """Log-probs, loss and gradient norm to 1e-5 in float32, on one, two and four ranks."""
    kinds: list[tuple[str, bool, dict[str, Any]]] = [
        ("LlamaForCausalLM", False, {}),
        ("Qwen2ForCausalLM", True, {}),
        ("Qwen2ForCausalLM", False, {}),
        ("Gemma3ForCausalLM", True, GEMMA3),
        # Responses are longer, and samples share prompts.
        ("MistralForCausalLM", False, {"sliding_window": 4}),
        (
            "Qwen3ForCausalLM",
            False,
            {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
        ),
    ]
    folders, expected = [], []
    for number, (architecture, tied, more) in enumerate(kinds):
        folder = make_tiny_folder(
            tmp_path / str(number), architecture, tie_embeddings=tied, **more
        )
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        with torch.no_grad():
            made = policy_log_probs(model, experience(same_prompts=3))
        folders.append(folder)
        expected.append((made, by_transformers(folder, grpo, same_prompts=3)[0]))
    for ranks in (1, 2, 4):
        [found, *_] = launch.world(
            ranks, "tests.workers.ranks:under_both_engines", folders=folders, **GRPO
        )
        for (architecture, tied, _), by_engine, (log_probs, metrics) in zip(
            kinds, found, expected, strict=True
        ):
            assert by_engine.keys() == {"fsdp", "megatron"}
            for engine, each in by_engine.items():
                wrong = (
                    (torch.tensor(each.pop("log_probs")).double() - log_probs)
                    .abs()
                    .max()
                )
                assert wrong < 1e-5, (ranks, architecture, tied, engine, wrong)
                assert each == pytest.approx(metrics, abs=1e-5), (
                    ranks,
                    architecture,
                    tied,
                    engine,
                )


def policy_log_probs(model: torch.nn.Module, batch: RolloutBatch) -> Tensor:
    """[B, R] float64, zero in the padding."""
    found = torch.zeros(batch["generated_ids"].shape, dtype=torch.float64)
    for row, (hidden, tokens, _) in enumerate(responses(model, batch)):
        log_p = torch.log_softmax(model.lm_head(hidden) / TEMPERATURE, dim=-1)
        found[row, : len(tokens)] = log_p.gather(1, tokens[:, None])[:, 0]
    return found


BALANCE = 5.0


def with_balance(model: torch.nn.Module, batch: RolloutBatch) -> Tensor:
    """GRPO's loss and transformers' load-balancing loss of each sample, by its tokens."""
    lengths = zip(
        batch["prompt_lengths"].tolist(),
        batch["response_mask"].sum(1).tolist(),
        strict=True,
    )
    rows = [
        torch.cat(
            [batch["input_ids"][row, :prompt], batch["generated_ids"][row, :response]]
        )
        for row, (prompt, response) in enumerate(lengths)
    ]
    balance = torch.stack(
        [
            len(row) * model(row[None], output_router_logits=True).aux_loss.double()
            for row in rows
        ]
    )
    return grpo(model, batch) + BALANCE * balance.sum() / sum(map(len, rows))


def test_routers_losses_are_transformers_own(launch: Launcher, tmp_path: Path) -> None:
    """A micro-batch of each sample, so that any ranks make the same losses; by the model's own config, or by key."""
    own = {"output_router_logits": True, "router_aux_loss_coef": BALANCE}
    folder = make_tiny_folder(
        tmp_path / "model", "Qwen3MoeForCausalLM", num_hidden_layers=2, **own
    )
    metrics, weights = by_transformers(folder, with_balance)
    before, right = (
        load_file(folder / "model.safetensors"),
        ({"grad_norm": metrics["grad_norm"]}, weights),
    )
    without, router = by_transformers(folder, grpo)[1], "model.layers.0.mlp.gate.weight"
    assert (without[router] - weights[router]).abs().max() > 3e-4
    by_key = {
        "fsdp": {"router_aux_loss_coef": BALANCE},
        "activation_checkpointing": "full",
        "chunked_logits": True,
    }
    for name, ranks, more in (("by config", 1, {"fsdp": {}}), ("by key", 2, by_key)):
        given = {**GRPO, "gradient_accumulation": 6 // ranks, **more}
        assert_right(
            updated(launch, folder, tmp_path / name, {"dp": ranks}, **given),
            right,
            before,
            name,
        )


YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
}


@pytest.mark.parametrize(
    "more", [{}, {"q_lora_rank": None, "rope_parameters": YARN}], ids=["rope", "yarn"]
)
def test_an_update_of_latent_attention_in_packed_rows(
    launch: Launcher, tmp_path: Path, more: dict[str, Any]
) -> None:
    """Every prompt is computed once for three samples, and each token rotated by its place in its own."""
    folder = make_tiny_folder(
        tmp_path / "model", "DeepseekV3ForCausalLM", num_hidden_layers=2, **more
    )
    expected = by_transformers(folder, grpo, same_prompts=3)
    before = load_file(folder / "model.safetensors")
    for name, shape in {"one": {}, "tp2": {"tp": 2}}.items():
        megatron = {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
        given = {"same_prompts": 3, "megatron": megatron if shape else {}}
        assert_right(
            updated(launch, folder, tmp_path / name, shape, **GRPO, **given),
            expected,
            before,
            name,
        )
