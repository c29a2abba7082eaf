"""What a part of the user's own must keep to, as tests that they can run on it: `megaverl check-plugin`."""

from megaverl.trainer.contracts.check import KINDS, check

__all__ = ["KINDS", "check"]
