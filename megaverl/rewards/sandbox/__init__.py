"""Programs that nobody has read, run in processes that can do nothing but compute."""

from megaverl.rewards.sandbox.pool import ConfinedProgram, ProgramOutcome, Sandbox, SandboxLimits

__all__ = ["SandboxLimits", "ProgramOutcome", "Sandbox", "ConfinedProgram"]
