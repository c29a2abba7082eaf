"""Lengths and prompts of a step's samples: what every rank knows of all of them, to plan without communication."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cached_property
from typing import NamedTuple

from megaverl.data.prefix_tree import PrefixTree


class _Columns(NamedTuple):
    """Fields of `SequenceLengths`."""

    prompt_lengths: list[int]
    response_lengths: list[int]
    prompts: list[int]
    tree_of_tokens: PrefixTree | None = None


class SequenceLengths(_Columns):
    """Lengths and prompts of all samples of a batch, known to every rank whichever samples it holds.

    Attributes:
        prompt_lengths, response_lengths: tokens per sample.
        prompts: number per sample that is equal for samples which are planned together: those with identical prompts,
            token for token, or the conversations of one group of episodes.
        tree_of_tokens: tree of the samples' tokens. None: samples share equal prompts and nothing else.
    """

    @cached_property
    def tree(self) -> PrefixTree:
        """Return the tree of the tokens that samples share in a packed row."""
        if self.tree_of_tokens is not None:
            return self.tree_of_tokens
        return PrefixTree.of_prompts(self.prompts, self.prompt_lengths)

    @cached_property
    def plans(self) -> dict[Hashable, list[list[list[int]]]]:
        """Cache of planned micro-batches, by the other arguments of a plan.

        Roles often plan alike, and each one plans twice: once to announce its samples
        and once to compute.
        """
        return {}

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of prompt and response together, per sample."""
        return [
            prompt + response
            for prompt, response in zip(
                self.prompt_lengths, self.response_lengths, strict=True
            )
        ]
