"""One seed per generated sample, from what the sample is rather than from when or where it is drawn."""

from __future__ import annotations

import hashlib
import struct


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
