"""Seeds of samples and turns, and the split of prompts between an engine's replicas.

All are pure arithmetic, so every rank computes the same ones.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence


def split_prompts(
    lengths: Sequence[int],
    num_replicas: int,
    group_size: int = 1,
    conversations: Sequence[int] | None = None,
) -> list[list[int]]:
    """Split prompts between replicas so that all of them finish at about the same time.

    Replicas get the same number of samples, plus or minus one, as that decides how long
    decoding takes; then about the same number of prompt tokens. The `group_size`
    samples of one prompt stay on one replica, which computes their prefix once. Only
    the last groups are split, if the number of groups is not a multiple of the
    replicas.

    Args:
        lengths: tokens of each prompt.
        num_replicas: engines that share them.
        group_size: samples per prompt; the samples of a prompt are neighbours.
        conversations: conversation number of each prompt. Prompts with the same number go to the same replica in every
            call, since that replica has the conversation so far in its cache.

    Returns:
        For each replica the indices of its prompts, ascending. Every index occurs exactly once.
    """
    shares: list[list[int]] = [[] for _ in range(num_replicas)]
    if conversations is not None:
        # By number, so that every call sends a conversation to the same replica.
        for prompt, conversation in enumerate(conversations):
            shares[conversation % num_replicas].append(prompt)
        return shares

    def tokens_of(prompts: Sequence[int]) -> int:
        return sum(lengths[prompt] for prompt in prompts)

    groups = []
    for start in range(0, len(lengths), group_size):
        groups.append(range(start, min(start + group_size, len(lengths))))
    num_whole = len(groups) // num_replicas * num_replicas
    # The longest first, so that the short ones even out the loads at the end. Equal
    # lengths keep their order: every rank must compute the same split.
    units = sorted(
        groups[:num_whole], key=lambda group: (-tokens_of(group), group.start)
    )
    # Groups that cannot be divided evenly are split into single samples.
    singles = [
        range(prompt, prompt + 1) for group in groups[num_whole:] for prompt in group
    ]
    units += sorted(singles, key=lambda single: (-tokens_of(single), single.start))

    num_tokens = [0] * num_replicas
    for unit in units:
        replica = min(
            range(num_replicas),
            # Fewest samples first, then fewest tokens, then the lowest number: unique
            # on every rank.
            key=lambda number: (len(shares[number]), num_tokens[number], number),
        )
        shares[replica] += unit
        num_tokens[replica] += tokens_of(unit)
    return [sorted(share) for share in shares]


def sample_seed(run_seed: int, step: int, sample: int, purpose: str = "rollout") -> int:
    """Return the seed of one sample: 63 bits, equal on every machine and in every Python version.

    The seed is a keyed BLAKE2b hash of (run seed, step, sample), so neighbouring steps
    and samples get unrelated seeds. Its low 32 bits are as random as the rest, which
    matters because torch's CPU generator uses only those.

    Args:
        run_seed: `run.seed`.
        step: training step.
        sample: index of the sample within the step, over all replicas.
        purpose: separates draws that share the three numbers, e.g. "rollout" and "validation".
    """
    message = struct.pack("<qqq", run_seed, step, sample)
    digest = hashlib.blake2b(message, digest_size=8, key=purpose.encode()).digest()
    # The highest bit goes, because torch takes signed seeds.
    return int.from_bytes(digest, "little") >> 1


def turn_seed(
    run_seed: int,
    step: int,
    sample: int,
    turn: int,
    agent: str = "",
    purpose: str = "rollout",
) -> int:
    """Return the seed of one turn of an episode. The first turn of a single agent has the sample's own seed."""
    draw_name = f"{purpose}/{turn}/{agent}" if turn or agent else purpose
    # A BLAKE2b key has at most 64 bytes.
    if len(draw_name) > 64:
        draw_name = f"{purpose}/{turn}/{hashlib.blake2b(agent.encode(), digest_size=8).hexdigest()}"
    return sample_seed(run_seed, step, sample, draw_name)
