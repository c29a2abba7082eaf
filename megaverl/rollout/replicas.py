"""Which replica of the engine answers which prompts, and each sample's seed: arithmetic, the same on every rank."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence


def split_prompts(
    lengths: Sequence[int], num_replicas: int, group_size: int = 1, conversations: Sequence[int] | None = None
) -> list[list[int]]:
    """Deal prompts to replicas so that all finish at about the same time.

    Replicas get the same number of samples, give or take one, as that decides how long decoding takes; then
    about the same number of prompt tokens. The `group_size` samples of one prompt stay on one replica, where
    its prefix is computed once, except in the last groups when they do not come out even.

    Args:
        lengths: tokens of each prompt.
        num_replicas: engines that share them.
        group_size: samples per prompt; the samples of a prompt stand next to each other.
        conversations: of each prompt, the number of the conversation that it continues; those of a number go to the
            same replica at every call, where what was said before is cached.

    Returns:
        For each replica the indices of its prompts, ascending. Every index is there exactly once.
    """
    if conversations is not None:
        return [
            [i for i, number in enumerate(conversations) if number % num_replicas == r] for r in range(num_replicas)
        ]
    groups = [range(start, min(start + group_size, len(lengths))) for start in range(0, len(lengths), group_size)]
    num_whole = len(groups) // num_replicas * num_replicas
    units = sorted(groups[:num_whole], key=lambda group: (-sum(lengths[i] for i in group), group.start))
    singles = [range(i, i + 1) for group in groups[num_whole:] for i in group]
    units += sorted(singles, key=lambda group: (-lengths[group.start], group.start))

    shares: list[list[int]] = [[] for _ in range(num_replicas)]
    num_tokens = [0] * num_replicas
    for unit in units:
        replica = min(range(num_replicas), key=lambda r: (len(shares[r]), num_tokens[r], r))
        shares[replica] += unit
        num_tokens[replica] += sum(lengths[i] for i in unit)
    return [sorted(share) for share in shares]


def sample_seed(run_seed: int, step: int, sample: int, purpose: str = "rollout") -> int:
    """The seed of one sample: 63 bits, the same on every machine and in every Python.

    A keyed BLAKE2b hash of (run seed, step, sample), so that neighbouring steps and samples get unrelated
    seeds; its low 32 bits alone are as good, which matters as torch's CPU generator uses only those.

    Args:
        run_seed: `run.seed`.
        step: training step.
        sample: the sample's number within the step, over all replicas.
        purpose: keeps draws apart that share the three numbers, e.g. "rollout" and "validation".
    """
    message = struct.pack("<qqq", run_seed, step, sample)
    digest = hashlib.blake2b(message, digest_size=8, key=purpose.encode()).digest()
    return int.from_bytes(digest, "little") >> 1


def turn_seed(run_seed: int, step: int, sample: int, turn: int, agent: str = "", purpose: str = "rollout") -> int:
    """The seed of one turn of an episode; the first turn of an only agent has the sample's own."""
    who = f"{purpose}/{turn}/{agent}" if turn or agent else purpose
    return sample_seed(run_seed, step, sample, who if len(who) <= 64 else f"{purpose}/{turn}/{hash_of(agent)}")


def hash_of(text: str) -> str:
    """A short name for a long one."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
