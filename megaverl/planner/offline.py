"""Communication and time of a step of `megaverl sft`, `dpo` and `reward`, counted as those of `megaverl train`.

Such a step has no rollouts. Its samples are rows of a data set, and it consists of one
update and, for some preference losses, of passes of the policy and of the reference
before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megaverl.config import Config
from megaverl.config.grids import OfflineCommand
from megaverl.config.signatures import signature_of
from megaverl.planner.collectives import received_in_collectives
from megaverl.planner.generation import LengthDistribution
from megaverl.planner.hardware import Hardware
from megaverl.planner.job import GB, PlannedJob, Role
from megaverl.planner.operators import StepLoad, over_samples
from megaverl.planner.report import fsdp_passes

# Inputs of a preference loss for which the policy scores all rows before the update
# (`workers.pairs`).
SCORED_BEFORE = {
    "chosen_alignment",
    "reference_kl",
    "reward_shift",
    "margin_shifts",
    "chosen_matched",
}


def with_rows(config: Config, command: OfflineCommand) -> Config:
    """Return the configuration with the samples of a step of this command in place of generated ones.

    A row of a pair is a prompt with two responses.
    """
    is_sft = command == "sft"
    stage = config.sft if is_sft else config.preference
    longest = (
        config.sft.max_answer_tokens
        if is_sft
        else config.preference.max_response_tokens
    )
    is_single = is_sft or (command == "dpo" and "desirable" in _inputs(config))
    sampling = config.rollout.sampling
    if longest is not None:
        sampling = {**sampling, "max_tokens": longest}
    algorithm = {
        "group_size": 1 if is_single else 2,
        "num_mini_batches": 1,
        "num_epochs": 1,
    }
    return config.model_copy(
        update={
            "algorithm": config.algorithm.model_copy(update=algorithm),
            "data": config.data.model_copy(
                update={"prompts_per_step": stage.batch_size}
            ),
            "rollout": config.rollout.model_copy(update={"sampling": sampling}),
        }
    )


def operators(
    job: PlannedJob, command: OfflineCommand
) -> Iterator[tuple[str, Role, str]]:
    """Yield (operator, its role, "score" or "update") for every pass over a step's rows."""
    model = job.actor
    if command == "dpo":
        inputs = _inputs(job.config)
        if job.config.preference_needs_reference:
            frozen = next((r for r in job.roles if r.name == "reference"), model)
            yield "ref_log_probs", frozen, "score"
            # KTO's reference point is of both policies, on mismatched pairs.
            if "reference_kl" in inputs:
                yield "ref_log_probs of mismatched pairs", frozen, "score"
        if inputs & SCORED_BEFORE:
            yield "log_probs", model, "score"
    yield "update", model, "update"


def _inputs(config: Config) -> set[str]:
    """Return the inputs of the preference loss."""
    return set(signature_of("preference_losses", config.preference.loss).reads)


def offline_as_dict(
    job: PlannedJob,
    command: OfflineCommand,
    hardware: Hardware,
    lengths: LengthDistribution,
) -> dict[str, Any]:
    """Return grids, samples, and the bytes and seconds of a step under plain names."""
    load = StepLoad(job, hardware, lengths, None)
    passes = list(operators(job, command))
    return {
        "ranks": job.world,
        "roles": {role.name: str(role.grid) for role in job.roles},
        "samples": load.samples,
        "prompt_tokens": lengths.prompt,
        "response_tokens": lengths.response,
        "collective_bytes": received_in_collectives(load, passes),
        "fsdp_micro_batch": {
            name: bytes_._asdict() for name, bytes_ in fsdp_passes(job).items()
        },
        "hardware": hardware.name,
        "seconds": {
            name: over_samples(load, role, kind)[0] for name, role, kind in passes
        },
    }


def offline_as_text(command: OfflineCommand, plan: dict[str, Any]) -> str:
    """Format the result of `offline_as_dict` for a terminal."""
    roles = ", ".join(f"{name} {grid}" for name, grid in plan["roles"].items())
    lines = [
        f"megaverl {command} on {plan['ranks']:,} ranks: {roles}",
        f"  a step: {plan['samples']:,} samples, prompts of {plan['prompt_tokens']:,.0f} tokens, responses of "
        f"{plan['response_tokens']:,.0f}",
    ]
    for role, counts in plan["collective_bytes"].items():
        text = ", ".join(f"{name} {count / GB:,.3g}" for name, count in counts.items())
        lines.append(f"  collectives, GB that the {role}'s first rank receives: {text}")
    for name, counts in plan["fsdp_micro_batch"].items():
        lines.append(
            f"  {name} under FSDP: of each micro-batch a rank receives {counts['gathered'] / GB:.2f} GB of weights "
            f"and {counts['reduced'] / GB:.2f} GB of gradients"
        )
    if not plan["collective_bytes"] and not plan["fsdp_micro_batch"]:
        lines.append("  collectives: none, as one rank holds the model")
    seconds = ", ".join(
        f"{name} {value:.2f}" for name, value in plan["seconds"].items()
    )
    lines.append(f"  seconds on {plan['hardware']}: {seconds}")
    return "\n".join(lines)
