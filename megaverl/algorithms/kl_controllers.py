"""The coefficient of the KL penalty: fixed, or steered towards a target divergence."""

from __future__ import annotations

import math
from typing import Any, Protocol

from megaverl.errors import CheckpointError, ConfigError, TrainingStopped


class KLController(Protocol):
    """Holds `coef`; told the measured KL once per step; its state goes into the checkpoint (plain JSON)."""

    coef: float

    def update(self, kl: float) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class FixedKL:
    """A coefficient that stays as it is."""

    def __init__(self, coef: float) -> None:
        if not coef >= 0:
            raise ConfigError(f"the KL coefficient must not be negative, found {coef}")
        self.coef = coef

    def update(self, kl: float) -> None:
        """Nothing to learn from the measured KL; it must still be a number."""
        _check_kl(kl)

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "fixed", "coef": self.coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Only checks the kind: a fixed coefficient is the configuration's, also of a run that is resumed."""
        _check_kind(state, "fixed")


class AdaptiveKL:
    """The log-space proportional controller of arXiv 1909.08593, section 2.2.

    error = clip(KL / target - 1, -0.2, 0.2), coef <- coef (1 + gain error), once per step.

    Args:
        coef: where it starts. target: the KL to hold, in nats, in the unit of the KL given to `update` (per
        token or per response: the caller's choice, but the same). gain: K_beta of the paper, there 0.1.
    """

    def __init__(self, coef: float, target: float, gain: float = 0.1) -> None:
        for name, number in (("coefficient", coef), ("target", target), ("gain", gain)):
            if not number > 0:
                raise ConfigError(f"the {name} of an adaptive KL penalty must be above 0, found {number}")
        self.coef, self.target, self.gain = coef, target, gain

    def update(self, kl: float) -> None:
        """Take one step towards the target.

        Raises:
            TrainingStopped: the measured KL is NaN or infinite.
        """
        _check_kl(kl)
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.coef *= 1.0 + self.gain * error

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "adaptive", "coef": self.coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up the coefficient; target and gain are the configuration's."""
        _check_kind(state, "adaptive")
        self.coef = float(state["coef"])


def _check_kl(kl: float) -> None:
    if not math.isfinite(kl):
        raise TrainingStopped(f"the measured KL is {kl}: log-probs of the policy or of the reference are not finite")


def _check_kind(state: dict[str, Any], expected: str) -> None:
    if state.get("kind") != expected:
        raise CheckpointError(
            f"the checkpoint holds a KL controller of kind {state.get('kind')!r}, the configuration asks for "
            f"{expected!r}; set algorithm.kl as in the run that was saved, or start without resuming"
        )
