"""What is said of learning curves: every run, also one that failed or did not learn; what is done is not done again."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaverl.config.algorithm import PRESETS
from megaverl.data.tasks import make_task
from megaverl.data.tokenizers import Tokenizer, load_tokenizer
from megaverl.rewards import RewardSample
from megaverl.rewards.rules import exact_match, positions
from megaverl.rollout.environments import Codec, Start
from tools import learning_curves
from tools.learning_curves import configuration, main, stored, write
from tools.learning_curves_page import Result, draw, page, table
from tools.learning_curves_settings import ALGORITHMS, COMMON
from tools.learning_curves_turns import TURN_TOKENS, DigitsInTurns, whole_answer

RESULTS = [
    Result("grpo", 0, [(0, 0.1), (50, 0.5), (100, 0.9)], 60.0, None),
    Result("grpo", 1, [(0, 0.2), (50, 0.4), (100, 0.6)], 60.0, None),
    Result("gpg", 0, [(0, 0.1), (50, 0.2), (100, 0.3)], 60.0, None),
    Result("ppo", 0, [(0, 0.1)], 3.0, "TrainingStopped: the loss is not finite"),
]


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_is_tried_with_the_same_budget(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning_curves, "teacher", lambda out, seed: out / "teacher")
    config = configuration(
        tmp_path, 1, "run", name, tmp_path / "model", check_paths=False
    )
    assert (config.algorithm.name, config.trainer.steps, config.samples_per_step) == (
        name,
        100,
        256,
    )
    assert (
        config.actor.optimizer["lr"] == 4e-4 and config.algorithm.num_mini_batches == 2
    )
    assert not [
        key for key in ALGORITHMS[name] if key.startswith("actor") or key in COMMON
    ]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("task") / "tokenizer.model"
    return load_tokenizer(make_task("reverse", num_train=200).train_tokenizer(path))


@pytest.mark.parametrize("response", ["54321", "54", "54x21", "543219", "12345", ""])
@pytest.mark.parametrize("stops", [True, False])
def test_in_turns_an_episode_is_paid_as_the_response_is(
    response: str, stops: bool, tokenizer: Tokenizer
) -> None:
    tokens = tokenizer.encode(response) + tokenizer.stop_token_ids[:1] * stops
    episode = DigitsInTurns(Codec(tokenizer, chat=False))
    episode.reset(Start([1], "reverse 12345 =", "54321"))
    turns = [tokens[at : at + TURN_TOKENS] for at in range(0, len(tokens), TURN_TOKENS)]
    outcomes = [episode.step(turn) for turn in turns]
    text = tokenizer.decode(tokens)
    sample = RewardSample("reverse 12345 =", "", "54321", transcript=text)
    whole = RewardSample("reverse 12345 =", text, "54321")
    paid = sum(outcome.reward for outcome in outcomes) + whole_answer(sample)
    assert paid == pytest.approx(positions(whole) + exact_match(whole))
    assert [outcome.done for outcome in outcomes] == [False] * (len(turns) - 1) + [
        stops
    ] * bool(turns)
    if response == "54321":
        assert outcomes[0].reward > 0, "at once, not at the end"


def test_the_table_hides_nothing() -> None:
    rows = {
        line.split("|")[1].strip(): line for line in table(RESULTS).splitlines()[2:]
    }
    assert list(rows) == ["ppo", "grpo", "gpg"], "in the order of the algorithms"
    assert "| 90.0%, 60.0% | +60.0% | +40.0% | yes |" in rows["grpo"]
    assert "+20.0% | NO |" in rows["gpg"] and "not finite" in rows["ppo"]
    assert "ppo, seed 0: TrainingStopped" in page(RESULTS)
    assert (
        "1 of 3 gain 30 points or more in the mean of their seeds, 1 of 3 on each seed."
        in page(RESULTS)
    )


def test_results_are_kept_and_drawn(tmp_path: Path) -> None:
    for result in RESULTS:
        write(tmp_path, result)
    # Of another task.
    (tmp_path / "results" / "shapes_0.json").write_text('{"seed": 0, "curve": []}')
    assert sorted(stored(tmp_path)) == sorted(RESULTS)
    draw(list(stored(tmp_path)), tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert (
        main(
            ["run", "--out", str(tmp_path), "--algorithms", "grpo", "--seeds", "0", "1"]
        )
        == 0
    ), "all is done"
    with_teacher = Result("gkd", 0, [(0, 0.1), (100, 0.5)], 60.0, None, [], 0.9)
    assert "| gkd (teacher: ppo) | 1 |" in table([with_teacher])
    assert "The teachers reach 90.0%." in " ".join(page([with_teacher]).split())
    assert main(["report", "--out", str(tmp_path), "--docs", str(tmp_path)]) == 0
    assert table(RESULTS) in (tmp_path / "learning_curves.md").read_text()


def test_the_docs_show_the_picture_and_every_algorithm() -> None:
    page = (Path(__file__).parents[2] / "docs" / "learning_curves.md").read_text()
    first_table = page.partition("| algorithm | seeds |")[2].partition("\n\n")[0]
    assert (
        len(first_table.splitlines()) == 2 + len(ALGORITHMS)
        and "(learning_curves.png)" in page
    )
