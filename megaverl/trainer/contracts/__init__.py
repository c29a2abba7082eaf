"""Contracts of plug-ins: tests that users run on their own code with `megaverl check-plugin`.

`contract` tests the promises of one plug-in; `kinds` has the promises of each kind and
needs torch.
"""

from megaverl.trainer.contracts.contract import (
    KINDS,
    Broken,
    Kind,
    Promise,
    PromiseResult,
    check,
    keep,
)

__all__ = ["KINDS", "Broken", "Kind", "Promise", "PromiseResult", "check", "keep"]
