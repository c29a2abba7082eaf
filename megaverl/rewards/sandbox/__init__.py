"""Sandbox for untrusted programs: workers that run several at once, each in a process that can only compute."""

from megaverl.rewards.sandbox.pool import (
    MECHANISMS,
    ConfinedProgram,
    ProgramOutcome,
    Sandbox,
    SandboxLimits,
    why_not_here,
)

__all__ = [
    "MECHANISMS",
    "ConfinedProgram",
    "ProgramOutcome",
    "Sandbox",
    "SandboxLimits",
    "why_not_here",
]
