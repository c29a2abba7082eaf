"""Rules that span the actor and its teacher, the frozen `reference`, for distillation."""

from __future__ import annotations

from megaverl.config.algorithm import BY_NAME
from megaverl.config.errors import ConfigIssue, conflict_issues
from megaverl.config.schema import Config
from megaverl.config.section import Issues


def teacher_issues(config: Config) -> Issues:
    """Yield mistakes in a teacher: its weights, its grid, and its tokenizer."""
    algorithm = config.algorithm
    divergence = algorithm.divergence_name
    if config.reference.tokenizer is not None:
        yield from other_tokenizer_issues(config)
    if algorithm.advantage_name == "distillation":
        text = "distillation has every token judged by a teacher, and this one would teach the actor to stay as it is. "
        yield from _same_weights_issues(
            config, f"{text}Name the teacher's folder.", BY_NAME
        )
    if divergence is None:
        return
    text = f"{divergence} compares the actor with a teacher, and this one would teach it to stay as it is. Name the "
    text += "teacher's folder; to stay near where training starts, use algorithm.kl."
    involves = ("algorithm.name", "algorithm.distillation.divergence")
    yield from _same_weights_issues(config, text, involves)
    # Both models compute the same vocabulary part on each rank, so the divergence needs
    # no exchange of logits.
    for name in ("engine", "tp", "pp", "cp", "vpp"):
        actors = getattr(config.actor, name)
        teachers = getattr(config.reference, name)
        if actors != teachers:
            text = f"found {teachers}, and actor.{name} is {actors}: {divergence} compares them rank by rank, "
            text += "vocabulary part by vocabulary part. Leave it out."
            involves = (f"actor.{name}", "algorithm.distillation.divergence")
            yield ConfigIssue(f"reference.{name}", text, involves=involves)


def _same_weights_issues(
    config: Config, text: str, involves: tuple[str, ...]
) -> Issues:
    """Yield a mistake if the teacher has the weights that training starts from."""
    path = config.reference.path
    if path in (None, config.model.path):
        state = "not set" if path is None else "model.path"
        yield ConfigIssue("reference.path", f"is {state}; {text}", involves=involves)


def other_tokenizer_issues(config: Config) -> Issues:
    """Yield settings that cannot be combined with a teacher that has another tokenizer.

    Such a teacher reads the text of a single turn.
    """
    algorithm = config.algorithm
    rollout = config.rollout
    key = "reference.tokenizer"
    if algorithm.advantage_name != "distillation":
        text = f"is of a teacher that is compared by its text; {algorithm.advantage_name} reads log-probs of the "
        text += "model's own tokens. Use algorithm.advantage=distillation, or a reference with the model's tokenizer."
        yield ConfigIssue(key, text, involves=BY_NAME)
    has_top_k = any(entry.top_k for entry in rollout.sampling_rules)
    reads_pairs = (
        any(entry.update == "preference" for entry in config.mix)
        and config.preference_needs_reference
    )
    tokens = "a teacher of other tokens"
    yield from conflict_issues(
        key,
        (
            (
                "algorithm.distillation.divergence",
                algorithm.divergence_name is not None,
                f"{tokens} has no probabilities of the student's tokens, top_k of them or all",
            ),
            (
                "algorithm.kl.in",
                algorithm.kl.place != "none",
                f"the KL to {tokens} is what distillation learns from",
            ),
            (
                "mix",
                reads_pairs,
                f"{tokens} has no log-probs of both responses of a pair in the student's tokens",
            ),
            (
                "rollout.adaptive_sampling",
                rollout.adaptive_sampling and has_top_k,
                "its rules have top_k, and the teacher's log-probs are over all of its own tokens",
            ),
            (
                "rollout.sampling.top_k",
                int(rollout.sampling.get("top_k") or 0) > 0,
                "the student's log-probs would be over its k likeliest tokens, and the teacher's over all of its own",
            ),
            (
                "environment.name",
                config.environment.name is not None,
                "what an environment answers is written in the student's tokens and chat template",
            ),
            (
                "data.tools",
                config.data.tools is not None,
                f"{tokens} is given the messages alone, without tools",
            ),
        ),
    )
