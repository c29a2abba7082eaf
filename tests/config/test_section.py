"""What all sections share."""

from __future__ import annotations

from collections.abc import Iterator

from megaverl.config import Config
from megaverl.config.algorithm import AlgorithmConfig
from megaverl.config.checks import ALL_COMMANDS, READ_BY
from megaverl.config.errors import ConfigIssue
from megaverl.config.roles import INHERITED
from megaverl.config.section import (
    Issues,
    Section,
    _rule_names,
    described_keys,
    field_meanings,
    rule,
    section_at,
)


def test_every_key_says_what_it_means():
    assert [entry.key for entry in described_keys(Config) if not entry.meaning] == []
    assert all(field_meanings(Config)[name] for name in Config.model_fields)


def test_a_meaning_over_several_lines_is_one_line():
    meanings = {entry.key: entry.meaning for entry in described_keys(Config)}
    assert not any("\n" in meaning or "  " in meaning for meaning in meanings.values())
    inherited = (
        "Tensor-parallel size: the matrices of every layer are split over this many ranks. These ranks communicate in "
        "every layer, so keep tp within a node."
    )
    assert meanings["actor.tp"] == meanings["critic.tp"] == inherited


def test_what_is_not_at_its_default():
    algorithm = AlgorithmConfig(gamma=0.5, policy_loss_options={"beta": 1})
    assert algorithm.changed() == {"gamma": 0.5, "policy_loss_options": {"beta": 1}}
    assert algorithm.changed("gamma", "lam") == {"gamma": 0.5}
    assert AlgorithmConfig(gamma=1.0, kl={"in": "none"}).changed() == {}


def test_defaults_are_not_shared():
    first, second = AlgorithmConfig(), AlgorithmConfig()
    first.advantage_options["k"] = 1
    assert second.advantage_options == AlgorithmConfig().advantage_options == {}


class Inner(Section):
    size: int = 1
    """Size."""

    @rule
    def check_size(self, at: str) -> Issues:
        """Refuse a size of 0."""
        if self.size == 0:
            yield ConfigIssue(f"{at}.size", "found 0.")


class Derived(Inner):
    inner: Inner = Inner()
    """One."""
    entries: list[Inner] = []
    """Several."""
    unit: str = "m"
    """Unit."""

    @rule
    def check_unit(self, at: str) -> Issues:
        """Refuse a unit without a size."""
        if self.size == 0:
            yield from self.unused(at, f"{at}.size is 0.", "unit")


def test_rules_are_applied_to_a_section_its_bases_and_the_sections_inside():
    broken = Derived(
        size=0, unit="km", inner=Inner(size=0), entries=[Inner(), Inner(size=0)]
    )
    found = {issue.key: issue.message for issue in broken.issues("a.b")}
    assert list(found) == [
        "a.b.size",
        "a.b.unit",
        "a.b.inner.size",
        "a.b.entries.1.size",
    ]
    assert found["a.b.unit"] == "is set, but a.b.size is 0."
    assert [*Derived().issues("a")] == []


def sections_inside(path: tuple[str, ...]) -> Iterator[type[Section]]:
    section = section_at(Config, path)
    if section is not None and issubclass(section, Section):
        yield section
        for name, field in section.model_fields.items():
            yield from sections_inside((*path, field.alias or name))


def test_every_rule_is_applied_by_a_command():
    """A rule of a section that no command reads would never be applied."""
    with_rules = {
        name
        for name in Config.model_fields
        if any(_rule_names(section) for section in sections_inside((name,)))
    }
    assert with_rules == {*READ_BY, "actor", *INHERITED}
    assert all(set(commands) <= set(ALL_COMMANDS) for commands in READ_BY.values())
