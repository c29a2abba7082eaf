"""Rules that span `draft`, the engine's speculative decoding, the model and the placement."""

from __future__ import annotations

from pathlib import Path

from megaverl.config.errors import ConfigIssue, conflict_issues
from megaverl.config.roles import SHARED_BY_CRITIC
from megaverl.config.run import is_hub_name
from megaverl.config.schema import Config
from megaverl.config.section import Issues
from megaverl.config.wording import yaml_text
from megaverl.errors import ModelError
from megaverl.sharding.draft_head import (
    HEAD_METHODS,
    MTP,
    HeadSpec,
    misfits_target,
    why_no_mtp,
)
from megaverl.sharding.model_spec import ModelSpec

SPECULATION = "rollout.vllm.speculative_config"
# Methods of vLLM whose drafts come from weights that a run can train.
TRAINED_METHODS = ("draft_model", *HEAD_METHODS)
# Fields with which the engine's draft model would be another one than the trained folder.
_OTHER_DRAFT = ("quantization", "revision", "code_revision", "use_heterogeneous_vocab")


def read_draft(config: Config) -> ModelSpec | None:
    """Return the sizes of the draft model, or None if its config.json is not on this machine or not readable."""
    path = config.draft_path
    if path is None or is_hub_name(path) or not (Path(path) / "config.json").is_file():
        return None
    try:
        return ModelSpec.outline(path)
    except ModelError:
        return None


def draft_issues(config: Config, spec: ModelSpec | None) -> Issues:
    """Yield settings with which the draft model cannot be trained.

    Args:
        spec: sizes of the actor's model. None: files are not to be read.
    """
    draft = config.draft
    if not draft.train:
        # The other fields may be the actor's.
        names = [name for name in draft.changed() if name not in SHARED_BY_CRITIC]
        reason = "draft.train is false. Set it, or leave this out."
        if names:
            yield from draft.unused("draft", reason, *names)
        return
    if config.rollout.engine != "vllm":
        text = f"is set, and rollout.engine is {config.rollout.engine}: only vLLM in the run's own processes receives "
        text += "the draft model's weights. Leave it out."
        yield ConfigIssue("draft.train", text, involves=("rollout.engine",))
        return
    yield from _method_issues(config)
    reason = "several models train, and the draft model learns from one"
    yield from conflict_issues(
        "draft.train",
        (
            ("environment.agents", config.environment.agents == "own", reason),
            ("placement.actor_islands", config.placement.actor_islands > 1, reason),
            (
                "trainer.replay_rollouts",
                config.trainer.replay_rollouts is not None,
                "no engine proposes drafts",
            ),
        ),
    )
    if spec is not None and config.draft_path is not None:
        yield from _model_issues(config, config.draft_path, spec)


def _method_issues(config: Config) -> Issues:
    """Yield mistakes in `rollout.vllm.speculative_config`, which names the model that is trained."""
    drafts = config.speculation
    if not drafts:
        text = f"is set, and {SPECULATION} is not. Name a small model of the same tokenizer there: {{model: FOLDER, "
        text += "num_speculative_tokens: 3}."
        yield ConfigIssue("draft.train", text, involves=(SPECULATION,))
        return
    method = drafts.get("method", "draft_model")
    if method not in TRAINED_METHODS:
        text = f"found {yaml_text(method)}, and draft.train trains draft models, EAGLE-3 heads and MTP heads only: "
        text += "megaverl has no trainable heads of other kinds (eagle, medusa, ...), and n-grams have no weights. Use "
        text += "draft_model, eagle3 or mtp, or leave draft.train out."
        yield ConfigIssue(f"{SPECULATION}.method", text, involves=("draft.train",))
    elif config.draft_path is None:
        text = "is not set, and draft.train is. Give the Hugging Face folder of a small model of the same tokenizer, "
        text += "or of a head (megaverl draft-head)."
        if method == MTP:
            text += " MTP layers inside the actor's folder cannot be trained: make a head with `megaverl draft-head "
            text += "--kind mtp`."
        yield ConfigIssue(f"{SPECULATION}.model", text, involves=("draft.train",))
    elif config.trains_head:
        yield from _head_issues(config)
    for name in _OTHER_DRAFT:
        if drafts.get(name):
            text = "is set, and the engine could not take the weights that draft.train brings. Leave one of both out."
            yield ConfigIssue(f"{SPECULATION}.{name}", text, involves=("draft.train",))


def _head_issues(config: Config) -> Issues:
    """Yield settings with which a head cannot read the actor's hidden states, or the engine not take its weights."""
    draft, actor = config.draft, config.actor
    number = config.speculation.get("num_speculative_tokens")
    if not isinstance(number, int) or number < 1:
        text = f"found {yaml_text(number)}; draft.train needs the number of drafts, as many steps of the head are "
        text += "trained. Set it, for example to 3."
        yield ConfigIssue(f"{SPECULATION}.num_speculative_tokens", text)
    if config.speculation.get("parallel_drafting"):
        text = "is set, and draft.train trains heads that propose one token after the other. Leave it out."
        yield ConfigIssue(f"{SPECULATION}.parallel_drafting", text)
    if draft.engine != "fsdp":
        text = f"found {draft.engine}; heads are trained under FSDP2. Set draft.engine=fsdp."
        yield ConfigIssue("draft.engine", text, involves=(f"{SPECULATION}.method",))
    for name, needs in (("pp", "hidden states of all layers"), ("cp", "whole rows")):
        if (size := getattr(actor, name)) > 1:
            text = f"found {size}, and a head needs {needs} on one rank. Set actor.{name}=1, or train a draft model."
            yield ConfigIssue(
                f"actor.{name}", text, involves=(f"{SPECULATION}.method",)
            )
    for name in ("tp", "cp"):
        size, needed = getattr(draft, name), getattr(actor, name)
        if size != needed:
            text = f"found {size}, and actor.{name} is {needed}: the head reads the actor's hidden states where the "
            text += f"actor computes them. Set draft.{name}={needed}."
            yield ConfigIssue(f"draft.{name}", text, involves=(f"actor.{name}",))
    if config.speculation["method"] == MTP and config.rollout.vllm.get("quantization"):
        text = "is set, and vLLM would quantise an MTP head too, to which new weights could not be written. Leave it "
        text += "out, or train an EAGLE-3 head."
        involves = (f"{SPECULATION}.method",)
        yield ConfigIssue("rollout.vllm.quantization", text, involves=involves)
    if draft.fsdp.attention != "auto" or draft.fsdp.liger:
        name = "liger" if draft.fsdp.liger else "attention"
        text = "is set, and a head has its own attention and norms. Leave it out."
        yield ConfigIssue(f"draft.fsdp.{name}", text)


def _fits_head(path: str, method: str, spec: ModelSpec) -> str:
    """Return why a head cannot read the actor's hidden states, or an empty string."""
    try:
        head = HeadSpec.from_folder(path)
    except ModelError as error:
        return str(error)
    text = f"found {yaml_text(path)}"
    if head.method != method:
        return (
            f"{text}, a head for the method {head.method}, and method is {method}. Set {SPECULATION}.method="
            f"{head.method}, or make another head."
        )
    if method == MTP and (reason := why_no_mtp(spec)):
        return f"{text}, and the actor {reason}. Make an EAGLE-3 head."
    if head.hidden_size != spec.hidden_size:
        return (
            f"{text} with hidden_size {head.hidden_size}, and the actor has {spec.hidden_size}. Make a head of this "
            "actor."
        )
    if differences := misfits_target(head, spec):
        return (
            f"{text} with {', '.join(differences)}: vLLM builds an MTP head with the actor's dimensions. Make a "
            "head of this actor."
        )
    if head.aux_layers[-1] > spec.num_layers:
        return (
            f"{text}, which reads the states after layer {head.aux_layers[-1]} of an actor with {spec.num_layers} "
            "layers. Make a head of this actor."
        )
    if spec.is_recurrent:
        return (
            f"{text}, and layers of {spec.architecture} carry a state, with which heads were not tried. Leave drafts "
            "out."
        )
    if spec.embedding_scale != 1.0:
        return (
            f"{text}, and {spec.architecture} scales its embeddings, which vLLM's heads read unscaled. Train a draft "
            "model."
        )
    return ""


def _model_issues(config: Config, path: str, spec: ModelSpec) -> Issues:
    """Yield reasons why the draft model does not fit the actor's model or its own engine."""
    key, involves = f"{SPECULATION}.model", ("draft.train",)
    if is_hub_name(path):
        return
    if not (Path(path) / "config.json").is_file():
        text = f"found {yaml_text(path)}, which is not a Hugging Face folder with config.json."
        yield ConfigIssue(key, text, involves=involves)
        return
    if config.trains_head:
        method = str(config.speculation["method"])
        if problem := _fits_head(path, method, spec):
            yield ConfigIssue(key, problem, involves=involves)
            return
    try:
        on_megatron = config.draft.engine == "megatron"
        draft = (ModelSpec.from_folder if on_megatron else ModelSpec.outline)(path)
    except ModelError as error:
        hint = (
            " Or set draft.engine: fsdp." if config.draft.engine == "megatron" else ""
        )
        yield ConfigIssue(key, f"{error}{hint}", involves=("draft.engine",))
        return
    if draft.vocab_size != spec.vocab_size:
        text = f"found {yaml_text(path)} with {draft.vocab_size} tokens, and the actor has {spec.vocab_size}. Use a "
        text += "model of the same tokenizer and vocab_size."
        yield ConfigIssue(key, text, involves=("model.path",))
    if draft.max_positions < config.max_tokens:
        text = f"found {yaml_text(path)} with a context of {draft.max_positions} tokens, and samples have up to "
        text += f"{config.max_tokens} (data.max_prompt_tokens plus rollout.sampling.max_tokens). Use another model."
        yield ConfigIssue(key, text, involves=involves)
