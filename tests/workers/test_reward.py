"""Reward models on transformers: scores as transformers gives them one by one, and what it cannot score is told."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megaverl.config.fsdp import FsdpConfig
from megaverl.data.batch import RolloutBatch
from megaverl.data.tasks import make_task
from megaverl.data.tokenizers import Tokenizer, load_tokenizer
from megaverl.distributed.grid import GridShape
from megaverl.distributed.groups import ProcessGroupManager
from megaverl.errors import ModelError, RewardError
from megaverl.models.tiny import make_tiny_folder
from megaverl.rewards import build_reward
from megaverl.rollout.engine import Generation
from megaverl.workers.advantage_computer import kept_by
from megaverl.workers.fsdp_model import FSDPModel
from megaverl.workers.model_options import ModelOptions
from megaverl.workers.pairs import RewardModel
from megaverl.workers.responses import once
from megaverl.workers.reward import (
    LearnedReward,
    RewardRole,
    Scores,
    TransformersRewardModel,
)
from tests.checkpoint.convert.folders import as_reward_model
from tests.workers.ranks import experience

SYSTEM = {"role": "system", "content": "9"}
TEMPLATE = "{% for m in messages %}{{ m['content'] }}={% endfor %}{% if add_generation_prompt %}0{% endif %}"
PROMPTS, RESPONSES = ["12=", "345=", "6=", "78="], ["21", "543", "6", "88"]


def test_metrics_count_the_policys_own_and_an_episode_once() -> None:
    """An opponent has tokens, and none in the mask; a row of an episode that goes on elsewhere is not its answer."""
    batch = RolloutBatch.from_generations(
        [[5]] * 4, [Generation([7], [0.0], "stop")] * 4, group_ids=[0] * 4
    )
    scores = Scores(
        torch.tensor([1.0, 2.0, 30.0, 40.0]), {}, torch.ones(4, dtype=torch.bool)
    )
    opponents = batch.with_(
        response_mask=batch.response_mask
        & torch.tensor([[True], [True], [False], [False]])
    )
    assert once(opponents, scores, has_opponents=True).total.tolist() == [1.0, 2.0]
    episodes = batch.with_(episode_ids=torch.tensor([0, 0, 1, 2]))
    assert once(episodes, scores).total.tolist() == [2.0, 30.0, 40.0]
    assert once(batch, scores).total.tolist() == scores.total.tolist()


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    task = make_task("reverse", num_digits=3, num_train=16, num_held_out=4)
    return load_tokenizer(
        task.train_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.model")
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    root = tmp_path_factory.mktemp("models")
    base = make_tiny_folder(
        root / "base", "Qwen3ForCausalLM", vocab_size=tokenizer.vocab_size
    )
    made = as_reward_model(base, root / "classifier")
    tokenizer.save(made)
    return made


def batch(tokenizer: Tokenizer) -> RolloutBatch:
    generations = []
    for text in RESPONSES:
        ids = tokenizer.encode(text)
        generations.append(
            Generation(token_ids=ids, log_probs=[0.0] * len(ids), finish_reason="stop")
        )
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    conversations = [[SYSTEM, {"role": "user", "content": text}] for text in PROMPTS]
    return RolloutBatch.from_generations(
        prompts, generations, columns={"messages": conversations, "prompt": PROMPTS}
    )


def one_by_one(folder: Path, tokens: list[list[int]]) -> torch.Tensor:
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(
        str(folder), dtype=torch.float32
    )
    with torch.no_grad():
        return torch.stack([model(torch.tensor([ids])).logits[0, 0] for ids in tokens])


def test_token_ids_of_the_same_vocabulary(
    group: dist.ProcessGroup, folder: Path, tokenizer: Tokenizer
) -> None:
    model = TransformersRewardModel(folder, tokenizer, group, micro_batch_tokens=12)
    tokens = [
        tokenizer.encode(p) + tokenizer.encode(r)
        for p, r in zip(PROMPTS, RESPONSES, strict=True)
    ]
    assert len({len(ids) for ids in tokens}) < len(tokens), "some share a forward pass"
    expected = one_by_one(folder, tokens)
    assert torch.allclose(model.scores(batch(tokenizer)), expected, atol=1e-5)
    assert expected.std() > 1e-3


def test_samples_that_come_early_get_the_same_scores(
    group: dist.ProcessGroup, folder: Path, tokenizer: Tokenizer
) -> None:
    """To the bit, in whatever order, though some are still missing when others are read."""
    model = TransformersRewardModel(folder, tokenizer, group, micro_batch_tokens=64)
    whole = RolloutBatch.concat([batch(tokenizer)] * 5)
    whole = whole.with_columns(
        reference=["1"] * 20,
        extra=[{}] * 20,
        prompt=[f"{n}" for n in range(20)],
        finish_reason=["stop"] * 20,
    )
    role = RewardRole(
        build_reward("exact_match"), tokenizer, group, [LearnedReward("rm", 1.0, model)]
    )
    expected = role.score(whole)
    read: list[int] = []
    scored, forward = model._scored, model.model.forward
    model._scored = lambda tokens: [read.extend(tokens), scored(tokens)][1]  # type: ignore[method-assign]
    order = [19, *range(7), *range(8, 19), 7]
    for first in range(0, 20, 3):
        rows = order[first : first + 3]
        role.score_some(whole.select(rows), rows, 20)
        assert len(read) == 0 or max(first + 3, 0) > 8
    assert sorted(read) == list(range(20)), "all were read before the whole was there"
    model.model.forward = None
    found = role.score(whole)
    model.model.forward = forward
    assert torch.equal(found.total, expected.total) and torch.equal(
        found.components["rm"], expected.components["rm"]
    )
    assert torch.equal(role.score(whole).total, expected.total), (
        "the next batch begins anew"
    )


def test_text_through_another_tokenizer(
    group: dist.ProcessGroup, folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """The conversation by its own chat template or, where it has none, the texts as they stand."""
    other = make_task("add", num_train=16, num_held_out=4).train_tokenizer(
        tmp_path / "tokenizer.model"
    )
    own = load_tokenizer(other)
    assert own.backend.get_vocab() != tokenizer.backend.get_vocab()
    base = make_tiny_folder(
        tmp_path / "base", "Qwen3ForCausalLM", vocab_size=own.vocab_size
    )
    made = as_reward_model(base, tmp_path / "classifier")
    own.save(made)
    model = TransformersRewardModel(made, tokenizer, group, micro_batch_tokens=64)
    texts = [f"9\n\n{p}{r}" for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    expected = one_by_one(
        made, [own.encode(text, add_special_tokens=True) for text in texts]
    )
    assert torch.allclose(model.scores(batch(tokenizer)), expected, atol=1e-5)
    (made / "chat_template.jinja").write_text(TEMPLATE)
    for reads, with_template in (
        (made, own),
        (with_own_template(folder, tmp_path / "same"), tokenizer),
    ):
        model = TransformersRewardModel(reads, tokenizer, group, micro_batch_tokens=64)
        texts = [f"9={p}={r}=" for p, r in zip(PROMPTS, RESPONSES, strict=True)]
        expected = one_by_one(reads, [with_template.encode(text) for text in texts])
        assert torch.allclose(model.scores(batch(tokenizer)), expected, atol=1e-5)
    bare = RolloutBatch(batch(tokenizer).tensors)
    with pytest.raises(
        RewardError, match="does not have the conversations .* as the column `messages`"
    ):
        model.scores(bare)


def with_own_template(folder: Path, output: Path) -> Path:
    """The same model and vocabulary, with a chat template."""
    shutil.copytree(folder, output)
    (output / "chat_template.jinja").write_text(TEMPLATE)
    return output


def test_a_classifier_of_any_architecture_under_fsdp(
    group: dist.ProcessGroup, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """As `reward_model.engine: fsdp` reads it: the language model's backbone, and the classifier's head."""
    made = tmp_path / "classifier"
    base = make_tiny_folder(
        tmp_path / "base",
        "Phi3ForCausalLM",
        vocab_size=tokenizer.vocab_size,
        pad_token_id=0,
    )
    groups = ProcessGroupManager()
    model = FSDPModel(
        as_reward_model(base, made),
        groups.grid(GridShape()),
        groups,
        ModelOptions(
            dtype=torch.float32,
            seed=0,
            trained=False,
            value_head=1,
            role="reward_model",
            initialize=False,
        ),
        fsdp=FsdpConfig(),
    )
    assert model.load(made) == []
    tokens = [
        tokenizer.encode(p) + tokenizer.encode(r)
        for p, r in zip(PROMPTS, RESPONSES, strict=True)
    ]
    found = RewardModel(model, micro_batch_tokens=12).scores(batch(tokenizer))
    assert torch.allclose(found, one_by_one(made, tokens), atol=1e-5)


def test_what_it_cannot_score(
    group: dist.ProcessGroup, folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = TransformersRewardModel(folder, tokenizer, group, micro_batch_tokens=64)
    model.model.config.max_position_embeddings = 4
    with pytest.raises(
        RewardError,
        match=r"prompt and response 0 have \d+ tokens, and it reads 4. Lower",
    ):
        model.scores(batch(tokenizer))
    several = tmp_path / "several"
    several.mkdir()
    for file in folder.iterdir():
        (several / file.name).write_bytes(file.read_bytes())
    config = json.loads((several / "config.json").read_text())
    config |= {
        "num_labels": 3,
        "id2label": {str(i): str(i) for i in range(3)},
        "label2id": {str(i): i for i in range(3)},
    }
    (several / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="it has 3 labels; a reward model has one"):
        TransformersRewardModel(several, tokenizer, group, micro_batch_tokens=64)
    (several / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(ModelError, match="cannot read it as a sequence classifier"):
        TransformersRewardModel(several, tokenizer, group, micro_batch_tokens=64)


def test_filters_by_name_keep_the_ends_of_each_group() -> None:
    batch = experience(6).with_(group_ids=torch.tensor([0, 0, 0, 1, 1, 1]))
    total = torch.tensor([0.0, 1.0, 0.5, 2.0, 1.0, 3.0])
    scores = Scores(total, {"rule": total}, total > 0)
    assert kept_by("best_and_worst", batch, scores).tolist() == [
        True,
        True,
        False,
        False,
        True,
        True,
    ]
    drawn = kept_by("best_and_random", batch, scores)
    assert drawn[1] and drawn[5] and int(drawn.sum()) == 4
    assert torch.equal(drawn, kept_by("best_and_random", batch, scores)), (
        "the same on every rank, and in a resumed run"
    )


def test_a_response_without_a_token_that_trains_is_as_long_as_it_is(
    group: dist.ProcessGroup, tokenizer: Tokenizer
) -> None:
    """Nash-MD's opponents: rewards are given the length of what they see."""
    role = RewardRole(build_reward("exact_match"), tokenizer, group, [])
    given = batch(tokenizer).with_columns(reference=["1"] * 4, extra=[{}] * 4)
    lengths = given.response_lengths.tolist()
    mask = given.response_mask.clone()
    mask[1], mask[0, 0] = False, False
    samples = role.samples(given.with_(response_mask=mask), range(len(given)))
    assert [sample.num_tokens for sample in samples] == [lengths[0] - 1, *lengths[1:]]
    assert samples[1].response == RESPONSES[1]
