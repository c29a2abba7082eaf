"""Sums of rewards, functions of the user's own, and what is said about one that misbehaves."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megaverl.errors import ConfigError, RewardError
from megaverl.rewards import RewardSample, build_reward, register_reward
from megaverl.rewards import registry as registry_module

SAMPLES = [
    RewardSample("What is 1+1?", "2", "2", {"level": 3}, "stop", 2),
    RewardSample("What is 2+2?", "5", "4", {"level": 4}, "length", 9),
    RewardSample("What is 3+3?", "6 ", "6", {"level": 5}, "stop", 4),
]

MY_REWARDS = """
from dataclasses import dataclass

def by_level(prompt, response, reference, extra, *, factor=1.0):
    return factor * extra["level"] if response.strip() == reference else 0

def lengths(prompts, responses, references, extras):
    return [len(response) for response in responses]

def short(sample):
    return sample.num_tokens < 5

def all_short(samples, limit):
    return tuple(float(sample.num_tokens < limit) for sample in samples)

def changes_extra(prompt, response, reference, extra):
    return extra.pop("level")

def unclear(pupil, question):
    return 0.0

def accuracy(sampled_response, reference_answer, strictness=1):
    return strictness * float(sampled_response.strip() == reference_answer)

answer = 42
"""


@pytest.fixture
def my_rewards(tmp_path: Path) -> Path:
    path = tmp_path / "my_rewards.py"
    path.write_text(MY_REWARDS, encoding="utf-8")
    return path


def own(function: Any, **entry: Any) -> Any:
    """A reward made of a function that stands in this file."""
    setattr(sys.modules[__name__], "_under_test", function)  # noqa: B010
    return build_reward({"function": f"{__name__}:_under_test", **entry})


def test_a_sum_is_weighted_and_its_parts_are_kept() -> None:
    reward = build_reward(
        [
            {"name": "exact_match", "weight": 2.0},
            {
                "name": "soft_overlong",
                "weight": 0.5,
                "options": {"max_tokens": 8, "buffer_tokens": 4},
            },
        ]
    )
    output = reward.score(SAMPLES)
    assert output.components == {
        "exact_match": [1.0, 0.0, 1.0],
        "soft_overlong": [0.0, -1.0, 0.0],
    }
    assert output.total == [2.0, -0.5, 2.0]
    assert output.correct == [True, False, True]
    metrics = output.metrics()
    assert metrics["reward/mean"] == pytest.approx(3.5 / 3)
    assert metrics["reward/accuracy"] == pytest.approx(2 / 3)
    assert metrics["reward/soft_overlong_mean"] == pytest.approx(-1 / 3)
    assert metrics["reward/std"] == pytest.approx(float(np.std([2.0, -0.5, 2.0])))
    assert (metrics["reward/min"], metrics["reward/max"]) == (-0.5, 2.0)
    assert reward.score([]).metrics() == {}


def test_accuracy_is_the_first_component_or_the_one_marked() -> None:
    form = {"name": "format", "pattern": "^.$"}
    assert build_reward([form, "exact_match"]).score(SAMPLES).correct == [
        True,
        True,
        False,
    ]
    marked = {"name": "exact_match", "accuracy": True}
    assert build_reward([form, marked]).score(SAMPLES).correct == [True, False, True]
    with pytest.raises(
        RewardError, match="accuracy: true stands at exact_match, exact_match_2"
    ):
        build_reward([marked, marked])


def test_partial_credit_is_not_correct() -> None:
    assert build_reward("positions").score([RewardSample("p", "12", "13")]).correct == [
        False
    ]


def test_an_entry_may_be_an_object() -> None:
    entry = SimpleNamespace(
        name="exact_match", function=None, weight=3.0, options={"strip": False}
    )
    assert build_reward([entry]).score(SAMPLES).total == [3.0, 0.0, 0.0]


def test_a_function_from_a_file(my_rewards: Path) -> None:
    reward = build_reward(
        {"function": f"{my_rewards}:by_level", "options": {"factor": 0.5}}
    )
    assert reward.score(SAMPLES).components == {"by_level": [1.5, 0.0, 2.5]}
    named = build_reward({"function": f"{my_rewards}:by_level", "name": "level"})
    assert list(named.score(SAMPLES).components) == ["level"]


def test_a_function_from_a_module(
    my_rewards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(my_rewards.parent))
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    assert build_reward({"function": "my_rewards:by_level"}).score(SAMPLES).total == [
        3.0,
        0.0,
        5.0,
    ]


def test_the_ways_a_function_may_be_called(my_rewards: Path) -> None:
    assert build_reward({"function": f"{my_rewards}:short"}).score(SAMPLES).total == [
        1.0,
        0.0,
        1.0,
    ]
    batched = {"function": f"{my_rewards}:lengths", "batched": True}
    assert build_reward(batched).score(SAMPLES).total == [1.0, 1.0, 2.0]
    # the same, as a configuration with only `options` says it
    entry = SimpleNamespace(
        function=f"{my_rewards}:all_short",
        weight=1.0,
        options={"batched": True, "limit": 3},
    )
    assert build_reward([entry]).score(SAMPLES).total == [1.0, 0.0, 0.0]


def test_parameters_have_names_of_their_own(my_rewards: Path) -> None:
    entry = {"function": f"{my_rewards}:accuracy", "options": {"strictness": 2}}
    assert build_reward(entry).score(SAMPLES).total == [2.0, 0.0, 2.0]


def test_a_function_cannot_change_the_row(my_rewards: Path) -> None:
    reward = build_reward({"function": f"{my_rewards}:changes_extra"})
    assert reward.score(SAMPLES).total == reward.score(SAMPLES).total == [3.0, 4.0, 5.0]


def test_neither_can_one_that_takes_a_batch() -> None:
    reward = own(
        lambda prompts, responses, references, extras: [
            extra.pop("level") for extra in extras
        ],
        batched=True,
    )
    assert reward.score(SAMPLES).total == reward.score(SAMPLES).total == [3.0, 4.0, 5.0]

    def empties(samples: list[RewardSample]) -> list[float]:
        levels = [float(sample.extra["level"]) for sample in samples]
        samples.clear()
        return levels

    assert (
        own(empties, batched=True).score(SAMPLES).total == [3.0, 4.0, 5.0]
        and len(SAMPLES) == 3
    )


@pytest.mark.parametrize("takes_samples", [False, True])
def test_one_by_one_and_in_a_batch_a_function_gets_the_same(
    takes_samples: bool,
) -> None:
    seen: list[tuple[Any, ...]] = []

    def of_sample(sample: RewardSample, factor: float = 1.0) -> float:
        seen.append(
            (sample.prompt, sample.response, sample.reference, dict(sample.extra))
        )
        return factor * len(sample.response)

    def of_fields(
        prompt: str, response: str, reference: Any, extra: Any, factor: float = 1.0
    ) -> float:
        return of_sample(RewardSample(prompt, response, reference, extra), factor)

    def of_samples(samples: list[RewardSample], factor: float = 1.0) -> list[float]:
        return [of_sample(sample, factor) for sample in samples]

    def of_lists(
        prompts: Any, responses: Any, references: Any, extras: Any, factor: float = 1.0
    ) -> list[float]:
        return [
            of_fields(*fields, factor)
            for fields in zip(prompts, responses, references, extras, strict=True)
        ]

    single, batched = (
        (of_sample, of_samples) if takes_samples else (of_fields, of_lists)
    )
    outputs = []
    for function, is_batched in ((single, False), (batched, True)):
        for options in ({}, {"factor": 3.0}):
            outputs.append(
                own(function, batched=is_batched, options=options).score(SAMPLES).total
            )
    assert outputs[0] == outputs[2] == [1.0, 1.0, 2.0] and outputs[1] == outputs[3] == [
        3.0,
        3.0,
        6.0,
    ]
    assert seen == 4 * [
        (s.prompt, s.response, s.reference, dict(s.extra)) for s in SAMPLES
    ]
    assert (
        own(single).score([]).total == own(batched, batched=True).score([]).total == []
    )


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(
    "value",
    [math.nan, None, "1", [1.0], torch.tensor([1.0, 2.0]), np.float32("inf"), 1j],
)
def test_one_by_one_and_in_a_batch_the_same_is_refused(
    value: Any, batched: bool
) -> None:
    def one(sample: RewardSample) -> Any:
        return value if sample is SAMPLES[1] else 0.0

    def all_of_them(samples: list[RewardSample]) -> list[Any]:
        return [one(sample) for sample in samples]

    with pytest.raises(
        RewardError, match=r"for sample 1 of 3 \(prompt: 'What is 2\+2\?'\)"
    ):
        own(all_of_them if batched else one, batched=batched).score(SAMPLES)


@pytest.mark.parametrize(
    "value",
    [
        True,
        1,
        1.0,
        np.float32(1),
        np.array(1.0),
        np.array([1.0]),
        torch.tensor(1.0),
        np.int64(1),
    ],
)
def test_any_number_is_a_reward(value: Any) -> None:
    total = (
        own(lambda prompt, response, reference, extra: value).score(SAMPLES[:1]).total
    )
    assert total == [1.0] and type(total[0]) is float


@pytest.mark.parametrize(
    "values", [[1, 2, 3], (1, 2, 3), np.array([1, 2, 3]), torch.tensor([1.0, 2.0, 3.0])]
)
def test_any_list_of_numbers_is_a_batched_reward(values: Any) -> None:
    reward = own(lambda prompts, responses, references, extras: values, batched=True)
    assert reward.score(SAMPLES).total == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (math.nan, "returned nan"),
        (math.inf, "returned inf"),
        (torch.tensor(math.nan), "returned nan"),
        (None, "NoneType None.*every path"),
        ("1", "str '1'"),
        ([1.0], "list"),
        ({"score": 1.0}, "dict"),
        (torch.tensor([1.0, 2.0]), "Tensor"),
        (1j, "complex"),
    ],
)
def test_a_reward_that_is_no_finite_number_names_function_sample_and_prompt(
    value: Any, said: str
) -> None:
    def mine(prompt: str, response: str, reference: Any, extra: Any) -> Any:
        return value if prompt == "What is 2+2?" else 0.0

    with pytest.raises(RewardError, match=said) as caught:
        own(mine, name="mine").score(SAMPLES)
    for text in ("'mine'", "sample 1 of 3", "What is 2+2?", "number"):
        assert text in str(caught.value)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([1.0, 2.0], "returned 2 numbers for a batch of 3 samples"),
        ([1.0, 2.0, 3.0, 4.0], "returned 4 numbers"),
        ([1.0, math.nan, 3.0], "returned nan for sample 1 of 3.*2\\+2"),
        ([1.0, 2.0, None], "NoneType None for sample 2 of 3"),
        (1.0, "float 1.0 for a batch of 3 samples; .* a list of 3 numbers"),
        (np.float64(1.0), "a list of 3 numbers"),
        (None, "a list of 3 numbers"),
        ("abc", "a list of 3 numbers"),
    ],
)
def test_a_batched_reward_of_the_wrong_count_or_type_is_named(
    values: Any, said: str
) -> None:
    with pytest.raises(RewardError, match=said):
        own(lambda prompts, responses, references, extras: values, batched=True).score(
            SAMPLES
        )


def test_a_reward_that_raises_names_function_sample_prompt_and_cause() -> None:
    def mine(prompt: str, response: str, reference: Any, extra: Any) -> float:
        return 1 / (int(response) - 5)

    with pytest.raises(
        RewardError, match=r"'mine' raised ZeroDivisionError: .*sample 1 of 3.*2\+2"
    ) as caught:
        own(mine, name="mine").score(SAMPLES)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)

    def batched(samples: list[RewardSample]) -> list[float]:
        raise KeyError("level")

    with pytest.raises(RewardError, match="raised KeyError: 'level', on a batch of 3"):
        own(batched, batched=True).score(SAMPLES)


def test_a_long_prompt_is_shown_as_an_excerpt() -> None:
    sample = RewardSample("begin " + "x" * 5000 + " end", "r")
    with pytest.raises(RewardError) as caught:
        own(lambda sample: None).score([sample])
    assert (
        "begin" in str(caught.value)
        and "end'" in str(caught.value)
        and len(str(caught.value)) < 400
    )


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("exact_macth", "Did you mean 'exact_match'.*There are: .*gsm8k"),
        ([], "no reward is configured"),
        ([{"weight": 1.0}], "needs a name or a function"),
        ([{"name": "exact_match", "weight": "much"}], "weight is 'much'"),
        ([{"name": "exact_match", "weight": math.nan}], "weight is nan"),
        (
            [{"name": "exact_match", "stripp": True}],
            "unexpected keyword argument 'stripp'",
        ),
        ({"function": "no_colon"}, "expected module:object or path/to/file.py:object"),
        ({"function": "a:b c"}, "expected module:object or path/to/file.py:object"),
        ({"function": "no_such_module_here:f"}, "ModuleNotFoundError.*PYTHONPATH"),
        ({"function": "no/such/file.py:f"}, "no/such/file.py is not there"),
        ({"function": "math:no_such"}, "math has no 'no_such'; it has"),
    ],
)
def test_a_reward_that_cannot_be_built_says_why(spec: Any, said: str) -> None:
    with pytest.raises(RewardError, match=said):
        build_reward(spec)


def test_a_file_that_cannot_be_used_says_why(my_rewards: Path, tmp_path: Path) -> None:
    with pytest.raises(
        RewardError, match="has no 'missing'; it has .*by_level.*lengths"
    ):
        build_reward({"function": f"{my_rewards}:missing"})
    with pytest.raises(RewardError, match=":answer is .*; expected a function"):
        build_reward({"function": f"{my_rewards}:answer"})
    with pytest.raises(
        RewardError, match="samples holds whole lists, which needs batched: true"
    ):
        build_reward({"function": f"{my_rewards}:all_short"})
    unbound = (
        r"takes \(pupil, question\).*cannot bind pupil.*response \(or sampled_response"
    )
    with pytest.raises(RewardError, match=unbound):
        build_reward({"function": f"{my_rewards}:unclear"}).check_columns(["level"])
    broken = tmp_path / "broken.py"
    broken.write_text("import no_such_library_here\n")
    with pytest.raises(
        RewardError, match=r"broken.py cannot be imported: ModuleNotFoundError"
    ):
        build_reward({"function": f"{broken}:f"})
    broken.write_text("def f(:\n")
    with pytest.raises(RewardError, match="cannot be imported: SyntaxError"):
        build_reward({"function": f"{broken}:f"})


def test_a_registered_reward_is_known_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    registry_module.reward_names()  # the built-in ones stay
    monkeypatch.setattr(
        registry_module, "_REGISTERED", dict(registry_module._REGISTERED)
    )

    @register_reward("vowels")
    def vowels(prompt: str, response: str, reference: Any, extra: Any) -> int:
        return sum(letter in "aeiou" for letter in response)

    assert build_reward("vowels").score([RewardSample("p", "aloe")]).total == [3.0]
    register_reward("vowels")(vowels)  # the same: a module that was imported twice
    with pytest.raises(RewardError, match="registered already"):
        register_reward("vowels")(lambda response: 0.0)


REGISTERS = """
from megaverl import register_reward

@register_reward
def accuracy_reward(sampled_response, reference_answer):
    return float(sampled_response.strip() == reference_answer)

@register_reward("many", batched=True)
def lengths(completions):
    return [len(text) for text in completions]
"""


def test_a_module_registers_its_rewards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry_module.reward_names()  # the built-in ones stay
    monkeypatch.setattr(
        registry_module, "_REGISTERED", dict(registry_module._REGISTERED)
    )
    path = tmp_path / "some_rewards.py"
    path.write_text(REGISTERS, encoding="utf-8")
    with pytest.raises(
        RewardError,
        match="no reward 'accuracy_reward'.*by a module that reward_modules names",
    ):
        build_reward("accuracy_reward")
    reward = build_reward(
        ["accuracy_reward", {"name": "many", "weight": 0.5}], modules=[str(path)]
    )
    assert reward.score(SAMPLES).total == [1.5, 0.5, 2.0]
    monkeypatch.syspath_prepend(str(tmp_path))
    build_reward("accuracy_reward", modules=["some_rewards", str(path)])
    with pytest.raises(ConfigError, match="reward_modules: .*nowhere.py is not there"):
        build_reward("accuracy_reward", modules=["nowhere.py"])


def test_gated_shaped_and_clipped(tmp_path: Path) -> None:
    path = tmp_path / "shapes.py"
    path.write_text(
        "seen = []\ndef size(response): seen.append(response); return len(response)\ndef square(x): return x * x"
    )
    reward = build_reward(
        [
            {"name": "finished", "weight": 0.0},
            {
                "function": f"{path}:size",
                "only_if": "finished",
                "shape": f"{path}:square",
                "clip": [2, 3],
                "weight": 2.0,
            },
        ]
    )
    output = reward.score(SAMPLES)
    assert output.components["size"] == [2.0, 0.0, 3.0], (
        "1 and 4, clipped; the second was cut off"
    )
    assert output.total == [4.0, 0.0, 6.0]
    assert sys.modules[reward.components[1].function.function.__module__].seen == [
        "2",
        "6 ",
    ], "it was not asked"


def test_what_cannot_be_scored_is_nan_in_all_that_depends_on_it() -> None:
    """Only of a reward that may fail; a gate that is not known makes what it guards unknown too."""
    lost = registry_module.RewardFunction(
        "lost",
        lambda sample: math.nan if sample.num_tokens == 9 else 1.0,
        may_fail=True,
    )
    other = registry_module.RewardFunction("other", lambda sample: 1.0)
    from megaverl.rewards import Component, Reward

    reward = Reward(
        [
            Component("lost", lost, clip=(0.0, 1.0)),
            Component("other", other, only_if="lost"),
        ]
    )
    output = reward.score(SAMPLES)
    assert [math.isnan(value) for value in output.total] == [False, True, False]
    assert math.isnan(output.components["other"][1])
    assert output.correct == [True, False, True]
    metrics = output.metrics()
    assert (
        metrics["reward/mean"],
        metrics["reward/accuracy"],
        metrics["reward/lost_mean"],
    ) == (2.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        (
            [{"name": "finished", "only_if": "exact_match"}, "exact_match"],
            "no reward of that name stands before it",
        ),
        ([{"name": "finished", "clip": [1, 0]}], "clip is"),
        ([{"name": "finished", "shape": "no_such_module:f"}], "reward.shape"),
    ],
)
def test_a_combination_that_cannot_be_is_refused(entries: Any, said: str) -> None:
    with pytest.raises(RewardError, match=said):
        build_reward(entries)
