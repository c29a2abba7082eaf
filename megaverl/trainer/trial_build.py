"""Trials of megatron-core's and vLLM's fields in child processes, before ranks start.

Fields that are passed to megatron-core can require kernels, packages and combinations
that only its own code checks, some of them in the first step. A trial builds a model of
the same kind with tiny matrices and these fields, and takes a step if the grid has one
rank.

A field that fails on a CPU is refused. On a GPU, the model is built only if no table of
needs (`field_needs`) covers the fields. A failure there is only a warning, because
kernels may refuse tiny matrices.

vLLM's configuration is created as its engine creates it, without weights. What vLLM
refuses there, it refuses on any machine.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megaverl.child_checks import Check, CheckResult, CheckRunner, run_in_children
from megaverl.config.errors import ConfigIssue
from megaverl.config.field_needs import NEEDS, fields_of, without_repeats
from megaverl.config.grids import OFFLINE, REINFORCING, megatron_sections
from megaverl.config.passthrough import TARGETS
from megaverl.config.schema import Config
from megaverl.errors import MegaverlError

if TYPE_CHECKING:
    from megaverl.distributed.grid import GridShape
    from megaverl.sharding.model_spec import ModelSpec

# Imports of torch and megatron-core take most of the time, and much longer on a busy
# machine.
DEADLINE_SECONDS = 300.0
TRAINING = (*REINFORCING, *OFFLINE)
SMALL_HEAD = 16
SMALL_WIDTH = 64
SMALL_VOCABULARY = 128
NUM_TRIED_TOKENS = 8
RANDOM = 11
ENGINES = "rollout"  # role of vLLM's engines


@dataclass
class TrialResult:
    """Result of the trials.

    Attributes:
        issues: fields that megatron-core or vLLM refuses.
        not_tried: roles whose trial did not finish, or whose failure is not conclusive.
    """

    issues: list[ConfigIssue]
    not_tried: list[str]


def try_roles(
    config: Config,
    command: str,
    deadline: float = DEADLINE_SECONDS,
    *,
    generates: bool = False,
) -> TrialResult:
    """Try every role with unusual fields in a child process: small Megatron models, and vLLM's configuration.

    Args:
        deadline: seconds that each trial may take.
        generates: whether the command runs vLLM engines in its own processes.
    """
    result = TrialResult([], [])
    roles = unusual_fields(config, command)
    if generates and (names := unusual_engine_fields(config)):
        roles[ENGINES] = {"vllm": names}
    for role, parts in roles.items():
        context = {"config": config.to_dict(), "command": command}
        key = f"{role}.{next(iter(parts))}"
        # Without `may_wait`, a trial that is late on a busy machine would count as a
        # refusal.
        doing = (
            "vLLM's configuration is made" if role == ENGINES else "its model is built"
        )
        check = {"key": key, "role": role, "doing": doing, "may_wait": True}
        # Each trial has its own process, because megatron-core stores some fields in
        # the environment.
        for outcome in run_in_children(
            "megaverl.trainer.trial_build:make_runner", context, [check], deadline
        ):
            if outcome.problem:
                fields = ", ".join(
                    f"{role}.{part}.{name}"
                    for part, names in parts.items()
                    for name in names
                )
                result.issues.append(
                    ConfigIssue(
                        key,
                        f"{outcome.problem} Fields that may be the cause: {fields}.",
                    )
                )
            elif outcome.left_out:
                result.not_tried.append(f"fields of {role} ({outcome.left_out})")
    return result


def unusual_fields(config: Config, command: str) -> dict[str, dict[str, list[str]]]:
    """Return, by role and mapping, the fields that select code. Fractional numbers select none."""
    roles: dict[str, dict[str, list[str]]] = {}
    for role, parts in without_repeats(megatron_sections(config, command)).items():
        for part, mapping in parts.items():
            if part == "optimizer" and command not in TRAINING:
                continue  # other commands have no optimizer
            fields = TARGETS[part].fields() or {}
            # A list, because values such as those of recompute_modules are not
            # hashable.
            usual = [("optimizer", "adam")] if part == "optimizer" else []
            names = [
                name
                for name, value in mapping.items()
                if (name, value) not in usual
                and name in fields
                and fields[name].type_text not in _PLAIN
            ]
            if names:
                roles.setdefault(role, {})[part] = names
    return roles


def unusual_engine_fields(config: Config) -> list[str]:
    """Return vLLM's fields that select code or must be consistent with each other."""
    fields = TARGETS["vllm"].fields() or {}
    return [
        name
        for name in config.rollout.vllm
        if name != "enforce_eager"
        and name in fields
        and fields[name].type_text not in _PLAIN
    ]


_PLAIN = ("float", "Optional[float]", "float | None")


def make_runner(context: Any) -> CheckRunner:
    """Return a function that runs one trial in this child process."""
    config = Config.model_validate(context["config"])
    command = context["command"]

    def run(check: Check) -> CheckResult:
        logging.disable(logging.CRITICAL)
        try:
            if check["role"] == ENGINES:
                return CheckResult(_try_engine(config))
            return _try_role(config, command, check["role"])
        except Exception as error:  # an error of the trial itself
            return CheckResult(left_out=f"{type(error).__name__}: {error}")

    return run


def _try_engine(config: Config) -> str:
    """Return the reason why vLLM refuses the fields, or an empty string."""
    # Variables that vLLM's `external_launcher` reads.
    os.environ.update(
        {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(config.rollout.tp)}
    )
    from megaverl.platform import platform
    from megaverl.rollout import vllm_engine
    from megaverl.rollout.vllm_options import VLLMOptions
    from megaverl.rollout.vllm_tracing import inspect_here
    from megaverl.sharding.model_spec import ModelSpec

    spec = ModelSpec.outline(config.model.path)
    vllm_engine.prepare_vllm()
    inspect_here(spec.architecture)
    try:
        arguments = vllm_engine.engine_arguments(
            config.rollout,
            spec,
            VLLMOptions(
                seed=config.run.seed,
                dtype=platform.dtype(config.model.dtype),
                max_model_len=config.max_tokens,
                load_weights=False,
                trust_remote_code=config.model.trust_remote_code,
                fp32_lm_head=config.model.fp32_lm_head,
                routed_experts=config.actor.router_replay != "off",
            ),
        )
        vllm_engine.make_configuration(config.model.path, arguments)
    except MegaverlError as error:
        return _sentence(str(error))
    return ""


def _try_role(config: Config, command: str, role: str) -> CheckResult:
    """Try one role. Return the reason why megatron-core refuses its fields, if it does."""

    from megaverl.distributed.grid import GridShape
    from megaverl.models.options import recompute_options, transformer_config
    from megaverl.platform import platform
    from megaverl.sharding.model_spec import ModelSpec
    from megaverl.trainer.build import grid_sizes

    section: Any = getattr(config, role)
    folder = getattr(section, "path", None) or config.model.path
    spec = ModelSpec.from_folder(folder)
    dtype = platform.dtype(config.model.dtype)
    sizes = grid_sizes(section)
    stage, experts = (
        sizes["tp"] * sizes["cp"],
        (sizes["etp"] or sizes["tp"]) * sizes["ep"],
    )
    # Fewest data-parallel ranks over which experts can be divided.
    world = math.lcm(stage, experts) * sizes["pp"]
    shape = GridShape.fit(world, **sizes, role=role)
    checkpointing = getattr(section, "activation_checkpointing", "none")

    def options(of: ModelSpec) -> dict[str, Any]:
        return recompute_options(checkpointing, of) | dict(section.megatron)

    try:
        transformer_config(spec, shape, dtype, options(spec))
        if hasattr(section, "ddp"):
            from megaverl.workers.optimizers import optimizer_configs

            optimizer = _optimizer_of(section, command)
            optimizer_configs(role, optimizer, section.ddp, dtype)
    except MegaverlError as error:
        return CheckResult(_sentence(str(error)))
    if platform.is_cuda and has_table_fields(section):
        return CheckResult()
    small = small_spec(spec, shape)
    try:
        transformer_config(small, shape, dtype, options(small))
    except MegaverlError:
        return CheckResult()  # the fields do not fit the small model
    try:
        with _pretended_world(world):
            build_and_step(small, shape, dtype, options(small), role, section, command)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        if platform.is_cuda:
            return CheckResult(
                left_out=f"on this GPU a small model with them fails with {_sentence(problem)[:-1]}"
            )
        return CheckResult(_sentence(f"megatron-core cannot use it here: {problem}"))
    return CheckResult()


def has_table_fields(section: Any) -> bool:
    """Return whether a role's fields require a kernel or package that a table of needs lists."""
    parts = fields_of(section)
    return any(
        name in NEEDS[part] and NEEDS[part][name].is_asked_for(value)
        for part, mapping in parts.items()
        for name, value in mapping.items()
    )


def _optimizer_of(section: Any, command: str) -> dict[str, Any]:
    """Return the fields with which a command trains a role. A stage's own learning rate makes no difference here."""
    fields = dict(section.optimizer) if command in TRAINING else {}
    return {"lr": 1e-6} | fields


def small_spec(spec: ModelSpec, shape: GridShape) -> ModelSpec:
    """Return a model of the same kind with tiny matrices. The numbers of layers, heads and experts are kept."""
    changes: dict[str, Any] = {
        "hidden_size": SMALL_WIDTH,
        "ffn_hidden_size": SMALL_HEAD * math.lcm(shape.tp, shape.expert_tp),
        "vocab_size": SMALL_VOCABULARY,
        # The trial reads no images, and no field of the configuration is about the
        # tower.
        "vision": None,
        "rope_axes": (),
    }
    if spec.mla is None:
        changes["head_dim"] = SMALL_HEAD
    else:
        changes["mla"] = replace(
            spec.mla,
            q_lora_rank=None if spec.mla.q_lora_rank is None else SMALL_HEAD,
            kv_lora_rank=SMALL_HEAD,
            qk_nope_head_dim=SMALL_HEAD,
            qk_rope_head_dim=SMALL_HEAD,
            v_head_dim=SMALL_HEAD,
        )
    if spec.delta_net is not None:
        changes["delta_net"] = replace(
            spec.delta_net, key_head_dim=SMALL_HEAD, value_head_dim=SMALL_HEAD
        )
    if spec.mamba is not None:
        changes["mamba"] = replace(
            spec.mamba,
            head_dim=SMALL_HEAD,
            # Ranks may divide the rows of a group.
            state_size=math.lcm(SMALL_HEAD, shape.tp),
        )
    if spec.moe is not None:
        width = SMALL_HEAD * shape.expert_tp
        shared = SMALL_HEAD * shape.tp if spec.moe.shared_ffn_hidden_size else 0
        changes["moe"] = replace(
            spec.moe, ffn_hidden_size=width, shared_ffn_hidden_size=shared
        )
    return replace(spec, **changes)


@contextlib.contextmanager
def _pretended_world(size: int) -> Iterator[None]:
    """Make this process rank 0 of `size` ranks whose collectives transfer nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megaverl.platform import platform

    dist.init_process_group(
        platform.backend if size == 1 else "fake",
        store=dist.HashStore() if size == 1 else FakeStore(),
        rank=0,
        world_size=size,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def build_and_step(
    spec: ModelSpec,
    shape: GridShape,
    dtype: Any,
    overrides: Mapping[str, Any],
    role: str,
    section: Any,
    command: str,
) -> None:
    """Build a role's model and its optimizer if it has one. Take a step if the grid has one rank."""
    from megaverl.config.algorithm import AlgorithmConfig
    from megaverl.distributed.groups import ProcessGroupManager
    from megaverl.workers.megatron_model import MegatronModel
    from megaverl.workers.model_options import ModelOptions
    from megaverl.workers.optimizers import MegatronTrainable
    from megaverl.workers.policy import Actor, Policy

    model = MegatronModel(
        spec,
        ProcessGroupManager().grid(shape),
        ModelOptions(
            dtype=dtype,
            seed=RANDOM,
            role=role,
            chunked_logits=section.chunked_logits,
            fake_quantization=getattr(section, "fake_quantization", None),
            pack_samples=section.pack_samples,
        ),
        overrides=overrides,
    )
    if not hasattr(section, "ddp"):
        if shape.world_size == 1:
            policy = Policy(
                model, temperature=1.0, micro_batch_tokens=4 * NUM_TRIED_TOKENS
            )
            policy.log_probs(_tried_batch(spec.vocab_size))
        return
    trainable = MegatronTrainable(
        model,
        optimizer=_optimizer_of(section, command),
        scheduler=section.scheduler,
        ddp=section.ddp,
        total_updates=1_000_000_000,  # a schedule's numbers are checked elsewhere
    )
    if shape.world_size == 1:
        algorithm = AlgorithmConfig()
        actor = Actor(
            trainable,
            algorithm,
            temperature=1.0,
            micro_batch_tokens=4 * NUM_TRIED_TOKENS,
            seed=RANDOM,
        )
        actor.update(_tried_batch(spec.vocab_size), step=0)


def _tried_batch(vocab_size: int) -> Any:
    """Return two samples of random tokens, with the fields that an update reads."""
    import torch

    from megaverl.data.batch import RolloutBatch

    generator = torch.Generator().manual_seed(RANDOM)
    shape = (2, NUM_TRIED_TOKENS)
    return RolloutBatch(
        {
            "input_ids": torch.randint(0, vocab_size, shape, generator=generator),
            "prompt_lengths": torch.full((2,), NUM_TRIED_TOKENS),
            "generated_ids": torch.randint(0, vocab_size, shape, generator=generator),
            "response_mask": torch.ones(shape, dtype=torch.bool),
            "rollout_log_probs": torch.full(shape, -4.0),
            "old_log_probs": torch.full(shape, -4.0),
            "advantages": torch.randn(shape, generator=generator),
        }
    )


def _sentence(text: str) -> str:
    """Return the text as one line that ends with a period."""
    line = " ".join(text.split())[:600]
    return line if line.endswith(".") else f"{line}."


assert set(NEEDS) <= set(TARGETS)
