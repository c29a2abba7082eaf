"""Which replica of the engine answers which prompts. Pure arithmetic, the same on every rank."""

from __future__ import annotations

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
