"""What the ranks do in tests/rollout/test_images.py."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from PIL import Image

from megaverl.config.roles import RolloutConfig
from megaverl.config.run import ImagesConfig
from megaverl.data.images import Images
from megaverl.data.prompts import PromptEncoder
from megaverl.data.tokenizers import load_tokenizer
from megaverl.distributed.grid import GridShape
from megaverl.distributed.shared_item import SharedItem
from megaverl.errors import RolloutError
from megaverl.rollout import EngineOptions, make_engine
from megaverl.rollout.engine import Generation, SamplingOptions
from megaverl.sharding.model_spec import ModelSpec
from megaverl.sharding.weight import shapes_of
from megaverl.workers.megatron_model import MegatronModel
from megaverl.workers.model_options import ModelOptions
from megaverl.workers.weight_sync import ActorWeights, WeightSync
from tests.models.ranks import manager

# The last weight of the tower, as vLLM calls it.
SCALED = {
    "qwen2_vl": "visual.merger.mlp.2.weight",
    "qwen2_5_vl": "visual.merger.mlp.2.weight",
    **dict.fromkeys(
        ("qwen3_vl", "qwen3_5", "qwen3_5_moe"), "visual.merger.linear_fc2.weight"
    ),
}


def pictures() -> list[Image.Image]:
    """Return two pictures of noise of different sizes."""
    drawn = numpy.random.default_rng(0)
    return [
        Image.fromarray(drawn.integers(0, 255, size, dtype=numpy.uint8))
        for size in ((60, 60, 3), (70, 90, 3))
    ]


def written(
    folder: str, images: list[Image.Image]
) -> list[tuple[list[int], list[SharedItem]]]:
    """Prompts: two with one image each, one with both, one without any."""
    tokenizer = load_tokenizer(folder)
    reader = Images.of(ImagesConfig(), folder, tokenizer)
    assert reader is not None
    encoder, mark = (
        PromptEncoder(tokenizer, image_token=reader.processor.token_id),
        reader.processor.written,
    )
    read = [reader.read(image, "image", "here") for image in images]
    texts = [("which colour " + mark, read[:1]), ("which colour " + mark, read[1:])]
    texts += [(mark + " and " + mark + " is the shape red", read), ("red and blue", [])]
    found = []
    for text, own in texts:
        prompt = encoder.encode(text, images=own)
        assert prompt is not None
        found.append((prompt.token_ids, own))
    return found


def log_prob_error(
    model: Any,
    prompts: list[tuple[list[int], list[SharedItem]]],
    answers: list[Generation],
) -> float:
    """Largest difference between the answers' log-probs and those of plain transformers."""
    worst = 0.0
    for (prompt, images), answer in zip(prompts, answers, strict=True):
        tokens = torch.tensor([prompt + answer.token_ids])
        seen = {
            name: [image.tensors[name] for image in images]
            for name in ("pixel_values", "image_grid_thw")
        }
        given: dict[str, Any] = {}
        if images:
            given = {
                "pixel_values": torch.cat(seen["pixel_values"]),
                "image_grid_thw": torch.stack(seen["image_grid_thw"]),
            }
        # An image token that was drawn is no place of an image, and has an embedding.
        drawn = tokens.clone()
        drawn[0, len(prompt) :][
            drawn[0, len(prompt) :] == model.config.image_token_id
        ] = 0
        given |= (
            {"mm_token_type_ids": (drawn == model.config.image_token_id).int()}
            if images
            else {}
        )
        embed = model.get_input_embeddings().register_forward_pre_hook(
            lambda module, args, own=tokens: (own,)
        )
        with torch.no_grad():
            logits = model(input_ids=drawn, **given).logits[0, len(prompt) - 1 : -1]
        embed.remove()
        expected = logits.log_softmax(-1).gather(1, tokens[0, len(prompt) :, None])[
            :, 0
        ]
        worst = max(
            worst, float((expected - torch.tensor(answer.log_probs)).abs().max())
        )
    return worst


def answers(folder: str, tp: int, dtype: str) -> dict[str, Any]:
    """How far the engine is from transformers, before and after its vision tower changed, and what it refuses.

    Args:
        dtype: the engine's and the actor's. transformers computes the same weights in float32.
    """
    from transformers import AutoModelForImageTextToText

    stored: torch.dtype = getattr(torch, dtype)
    engine: Any = make_engine(
        RolloutConfig(tp=tp),
        folder,
        EngineOptions(
            seed=0,
            dtype=stored,
            max_model_len=128,
            stop_token_ids=(2,),
            num_sequences=16,
        ),
        images=ImagesConfig(),
    )
    two_pictures = pictures()
    prompts = written(folder, two_pictures)
    tokens, images = [prompt for prompt, _ in prompts], [own for _, own in prompts]
    sampling, seeds = SamplingOptions(max_tokens=12), [7, 7, 7, 7]
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=stored)
    model = model.float().eval()
    found = engine.generate(tokens, sampling, seeds, images=images)
    error = log_prob_error(model, prompts, found)
    # the images as vLLM's own processor would have them, from one token for each
    token = model.config.image_token_id
    single = [
        one
        for n, one in enumerate(tokens[2])
        if one != token or tokens[2][n - 1] != token
    ]
    [own] = engine.llm._preprocess_cmpl(
        [{"prompt_token_ids": single, "multi_modal_data": {"image": two_pictures}}]
    )
    same_pixels = [
        torch.equal(
            theirs["pixel_values"].data, ours.tensors["pixel_values"].to(stored)
        )
        for theirs, ours in zip(own["mm_kwargs"]["image"], images[2], strict=True)
    ]
    with torch.no_grad():
        scaled = SCALED[model.config.model_type]
        engine.named_parameters()[scaled].mul_(3.0)
        model.get_parameter(f"model.{scaled}").mul_(3.0)
    engine.reset_prefix_cache()
    after = engine.generate(tokens, sampling, seeds, images=images)
    refused: list[str] = []
    # One more than there are places for; a larger one.
    for wrong in (images[2], images[1]):
        try:
            engine.generate(tokens[:1], sampling, seeds[:1], images=[wrong])
        except RolloutError as refusal:
            refused.append(str(refusal))
    found_after = log_prob_error(model, prompts, after)
    # An actor on Megatron-core gives the folder's weights back, the tower's included.
    actor = MegatronModel(
        ModelSpec.from_folder(folder),
        manager().grid(GridShape(tp=tp)),
        ModelOptions(dtype=stored, seed=0, initialize=False),
    )
    actor.load(folder)
    WeightSync(
        ActorWeights.of(actor),
        engine.layouts(shapes_of(actor.weights)),
        engine,
        actor.grid.world,
    ).reshard()
    engine.reset_prefix_cache()
    synced = engine.generate(tokens, sampling, seeds, images=images)
    engine.close()
    return {
        "error": error,
        "after": found_after,
        "log_probs": [each.log_probs for each in found],
        "changed": [
            each.log_probs != other.log_probs
            for each, other in zip(found, after, strict=True)
        ],
        "as_fresh": [
            each.token_ids == other.token_ids and each.log_probs == other.log_probs
            for each, other in zip(synced, found, strict=True)
        ],
        "expanded": own["prompt_token_ids"] == tokens[2],
        "same_pixels": same_pixels,
        "refused": refused,
    }
