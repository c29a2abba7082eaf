"""What the quickstart makes for a recipe with rows of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaverl.config import load_config
from megaverl.config.yaml_source import recipe
from megaverl.data.sources import open_source
from megaverl.data.tokenizers import load_tokenizer
from megaverl.rewards import build_reward
from megaverl.sharding.model_spec import ModelSpec
from megaverl.trainer.quickstart import prepare

RECIPE = "reasoning_gym/quickstart"


def test_rows_of_a_recipes_own_make_the_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym", reason="pip install 'megaverl[reasoning-gym]'")
    overrides = [f"run.dir={tmp_path}", "run.name=run"]
    config = load_config(recipe(RECIPE), overrides, command="quickstart", check_paths=False)
    prepare(config)
    inputs = tmp_path / "run" / "inputs"
    assert sorted(path.name for path in inputs.iterdir()) == ["model", "tokenizer.model"], "no rows of another task"
    tokenizer = load_tokenizer(config.model.path)
    train, held_out, warm_up = (
        open_source(sources[0]) for sources in (config.data.train, config.data.validation, config.sft.train)
    )
    for rows in (train, held_out, warm_up):
        for row in (rows[index] for index in range(100)):
            prompt, answer = tokenizer.encode(row["prompt"]), tokenizer.encode(row["answer"])
            assert answer == prompt[:0:-1] and tokenizer.decode(answer) == row["answer"], "a symbol, and letters"
    assert ModelSpec.from_folder(config.model.path).vocab_size == tokenizer.vocab_size
    words = {rows[index]["answer"] for rows in (train, warm_up) for index in range(len(rows))}
    assert not words & {held_out[index]["answer"] for index in range(len(held_out))}
    assert build_reward(config.reward).accuracy_component == "reasoning_gym"


def test_the_warm_up_has_the_tokens_of_an_episode(tmp_path: Path) -> None:
    """Of a call and its answer, each tokenised by itself in an episode; else a model may never find what to copy."""
    overrides = [f"run.dir={tmp_path}", "run.name=run"]
    config = load_config(recipe("games/calculator_tool"), overrides, command="quickstart", check_paths=False)
    prepare(config)
    tokenizer, rows = load_tokenizer(config.model.path), open_source(config.sft.train[0])
    for call, told in ((rows[index], rows[index + 1]) for index in range(0, 40, 2)):
        called, said = told["prompt"].removeprefix(call["prompt"]).removesuffix(" =").split("</s> is ")
        result = config.environment.options["result"].format(text=said)
        turns = tokenizer.encode(call["prompt"]), [*tokenizer.encode(called), tokenizer.eos_token_id]
        assert [*turns[0], *turns[1], *tokenizer.encode(result)] == tokenizer.encode(told["prompt"])
        assert called[:2] == call["answer"][:2] == " ["
