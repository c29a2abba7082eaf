"""Recipes of tinker-cookbook, unchanged, on the server: supervised, RL on arithmetic, DPO."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.tinker.server import RANK, Server

RENDERER = "role_colon"


def common(server: Server, folder: Path, **more: Any) -> dict[str, Any]:
    """Return the settings that all recipes take."""
    return {
        "log_path": str(folder / "log"),
        "model_name": str(server.model),
        "recipe_name": "test",
        "renderer_name": RENDERER,
        "base_url": server.url,
        "lora_rank": RANK,
        "eval_every": 0,
        **more,
    }


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "log" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def conversations(folder: Path) -> Path:
    """Write a file of conversations."""
    file = folder / "conversations.jsonl"
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"What is {a} plus {b}?"},
                {"role": "assistant", "content": f"The sum is {a + b}."},
            ]
        }
        for a in range(4)
        for b in range(4)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def dataset_config(server: Server, batch_size: int) -> Any:
    from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

    return ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=str(server.model),
        renderer_name=RENDERER,
        max_length=200,
        batch_size=batch_size,
    )


def supervised(server: Server, tmp_path: Path) -> None:
    from tinker_cookbook.supervised import train
    from tinker_cookbook.supervised.data import FromConversationFileBuilder

    dataset = FromConversationFileBuilder(
        file_path=str(conversations(tmp_path)), common_config=dataset_config(server, 8)
    )
    config = train.Config(
        **common(server, tmp_path, num_epochs=3, save_every=2),
        dataset_builder=dataset,
        learning_rate=1e-2,
    )
    asyncio.run(train.main(config))
    losses = [
        row["train_mean_nll"] for row in metrics_of(tmp_path) if "train_mean_nll" in row
    ]
    assert len(losses) == 6 and losses[-1] < losses[0] - 0.5
    # A second call goes on from the last checkpoint: there is nothing left to do.
    asyncio.run(train.main(config))
    saved = (tmp_path / "log" / "checkpoints.jsonl").read_text()
    assert "/weights/final" in saved and "/sampler_weights/final" in saved


def rl_on_arithmetic(server: Server, tmp_path: Path) -> None:
    from tinker_cookbook.recipes.math_rl.arithmetic_env import ArithmeticDatasetBuilder
    from tinker_cookbook.rl import train

    dataset = ArithmeticDatasetBuilder(
        batch_size=2,
        model_name_for_tokenizer=str(server.model),
        renderer_name=RENDERER,
        n_batches=2,
        group_size=4,
    )
    config = train.Config(
        **common(server, tmp_path, save_every=0),
        dataset_builder=dataset,
        learning_rate=1e-3,
        max_tokens=12,
    )
    asyncio.run(train.main(config))
    rows = metrics_of(tmp_path)
    assert len([row for row in rows if "env/all/reward/total" in row]) == 2
    # The trainer's log-probs are those of the engine that sampled.
    kl = [
        row["optim/kl_sample_train_v1"]
        for row in rows
        if "optim/kl_sample_train_v1" in row
    ]
    assert kl and all(abs(value) < 1e-3 for value in kl)


def preferences(server: Server, tmp_path: Path) -> None:
    import chz
    import datasets
    from tinker_cookbook.preference import train_dpo
    from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
    from tinker_cookbook.preference.preference_datasets import ComparisonDatasetBuilder
    from tinker_cookbook.preference.types import Comparison, LabeledComparison

    @chz.chz
    class Sums(ComparisonDatasetBuilder):
        def get_train_and_test_datasets(self) -> Any:
            rows = [{"a": a, "b": b} for a in range(4) for b in range(2)]
            return datasets.Dataset.from_list(rows), None

        def example_to_labeled_comparison(self, example: dict[str, int]) -> Any:
            a, b = example["a"], example["b"]
            comparison = Comparison(
                prompt_conversation=[
                    {"role": "user", "content": f"What is {a} plus {b}?"}
                ],
                completion_A=[{"role": "assistant", "content": str(a + b)}],
                completion_B=[{"role": "assistant", "content": "I do not know."}],
            )
            return LabeledComparison(comparison=comparison, label="A")

    dataset = DPODatasetBuilderFromComparisons(
        comparison_builder=Sums(), common_config=dataset_config(server, 4)
    )
    config = train_dpo.Config(
        **common(server, tmp_path, num_epochs=2, save_every=0),
        dataset_builder=dataset,
        learning_rate=5e-3,
    )
    train_dpo.main(config)
    rows = [row for row in metrics_of(tmp_path) if "dpo_loss" in row]
    # At the start policy and reference are equal: the loss is log 2.
    assert rows[0]["dpo_loss"] == pytest.approx(0.6931, abs=1e-3)
    assert rows[-1]["dpo_loss"] < rows[0]["dpo_loss"] - 0.05
