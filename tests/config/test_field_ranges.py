"""Numbers that no run can use are refused, at every field that is a number."""

from __future__ import annotations

from typing import Any, get_args, get_origin

import pytest

from megaverl.config import Config, load_config
from megaverl.config.section import Section, described_keys


def test_a_folder_where_nothing_can_be_made(mistakes):
    assert "nothing can be made in /proc" in mistakes("run.dir=/proc/x")["run.dir"]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rollout.sampling.top_p=2", "at most 1"),
        ("rollout.sampling.top_p=0", "above 0"),
        ("rollout.sampling.temperature=-1", "at least 0"),
        ("rollout.sampling.top_p=.nan", "finite"),
        ("trainer.validation_sampling.top_p=2", "at most 1"),
        ("rollout.vllm.gpu_memory_utilization=7", "at most 1"),
        ("actor.optimizer.weight_decay=.inf", "finite"),
        ("actor.optimizer.clip_grad=-1", "at least 0"),
        ("actor.optimizer.lr=1e300", "at most 10"),
        ("critic.optimizer.adam_beta2=1.0", "below 1"),
        ("actor.scheduler.start_wd=-0.1", "at least 0"),
        ("actor.megatron.hidden_dropout=1.0", "below 1"),
        ("actor.ddp.bucket_size=0", "at least 1"),
        ("sft.lr=1e300", "at most 10"),
        ("run.timeout_minutes=0.0001", "at least 0.01"),
        ("algorithm.group_size=99999999999", "at most 65536"),
        ("run.nproc=100000", "at most 1024"),
        ("actor.tp=100000", "at most 65536"),
        ("algorithm.policy_loss_options.x=1e999", "finite"),
        ("rollout.sampling.extra_args={a: {b: [1, .inf]}}", "finite"),
    ],
)
def test_numbers_that_no_run_can_use(mistakes, override, said):
    found = mistakes(override)
    key = next(key for key in found if key.startswith(override.partition("=")[0]))
    assert said in found[key]


def number_keys() -> list[str]:
    return [
        entry.key
        for entry in described_keys(Config)
        if entry.type.startswith(("int", "number"))
    ]


@pytest.mark.parametrize(
    "value", ["1e300", "-1e300", ".nan", ".inf", "99999999999999999999"]
)
def test_no_number_of_a_section_is_without_bounds(value):
    """Every field that is a number refuses what no run can use."""
    keys = [
        key
        for key in number_keys()
        if ".N." not in key and not key.startswith("placement.")
    ]
    assert len(keys) > 100
    accepted = []
    for key in keys:
        try:
            load_config(
                None,
                [f"{key}={value}", "model.path=m", "reward=exact_match"],
                check_paths=False,
            )
        except ValueError as error:
            raise AssertionError(key) from error
        except Exception as error:
            if key not in str(error):
                accepted.append(key)
            continue
        accepted.append(key)
    assert accepted == []


def test_sections_have_no_bare_numbers():
    """A field of a section is never a plain int or float: each has its range."""

    def sections(section: type[Section]) -> set[type[Section]]:
        found = {section}
        for field in section.model_fields.values():
            for part in flat(field.annotation):
                if isinstance(part, type) and issubclass(part, Section):
                    found |= sections(part)
        return found

    def flat(annotation: Any) -> list[Any]:
        parts = get_args(annotation) if get_origin(annotation) is not None else ()
        return [annotation, *(each for part in parts for each in flat(part))]

    bare = []
    for section in sections(Config):
        for name, field in section.model_fields.items():
            if not field.metadata and any(
                part in (int, float) for part in [field.annotation]
            ):
                bare.append(f"{section.__name__}.{name}")
    assert bare == []
