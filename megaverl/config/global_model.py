"""Rules of `coordinator.aggregates: gradients`: a global model on the coordinator's ranks, replicas on islands."""

from __future__ import annotations

from typing import TypeVar

from megaverl.config.errors import ConfigIssue
from megaverl.config.roles import CoordinatorConfig, TrainedConfig
from megaverl.config.schema import Config
from megaverl.config.section import Issues
from megaverl.distributed.placement import ResolvedPlacement
from megaverl.sharding.model_spec import ModelSpec

KEY = "coordinator.aggregates"
# End of messages about settings that only the default supports.
_OR_STATISTICS = f", or set {KEY} to statistics."

Trained = TypeVar("Trained", bound=TrainedConfig)


def global_section(section: Trained, coordinator: CoordinatorConfig) -> Trained:
    """Return the section of a role with the grid of its global model on the coordinator's ranks."""
    sizes = {"tp": coordinator.tp, "pp": coordinator.pp, "cp": 1, "ep": 1}
    return section.model_copy(update={**sizes, "etp": None, "vpp": None})


def global_model_issues(config: Config, spec: ModelSpec | None) -> Issues:
    """Yield settings that do not go together with `coordinator.aggregates`, whatever the placement.

    Args:
        spec: sizes of the model, or None if they are not known yet.
    """
    coordinator = config.coordinator
    if not config.aggregates_gradients:
        for name in coordinator.changed("tp", "pp"):
            text = f"is set, and only a global model has such a grid. Leave it out, or set {KEY} to gradients."
            yield ConfigIssue(f"coordinator.{name}", text)
        return
    if config.placement.actor_islands == 1:
        text = "is gradients, and the actor has no islands whose gradients could be summed. Set "
        yield ConfigIssue(KEY, f"{text}placement.actor_islands, or leave it out.")
    refused = (
        (
            "coordinator.islands_every",
            coordinator.islands_every > 1,
            "is above 1, and islands without an optimizer take no local steps. Use 1",
        ),
        (
            "coordinator.islands_compress",
            coordinator.islands_compress != "none",
            "is set, and gradients are sent as they are. Leave it out",
        ),
        (
            "reshard.overlap",
            config.reshard.overlap,
            "is true, and weights are sent after the global model's step. Leave it out",
        ),
        (
            "reshard.folder",
            config.reshard.folder is not None,
            "is set, and gradients do not travel through files. Leave it out",
        ),
        (
            "trainer.operators",
            bool(config.trainer.operators),
            "adds operators, and a flow sends weights from the actor's ranks. Use trainer.program",
        ),
        (
            "rollout.engine",
            config.rollout.engine == "server",
            "is server, and servers receive weights from the actor's ranks. Use vllm or hf",
        ),
        (
            "model.dtype",
            config.model.dtype == "float16",
            "is float16, whose loss scaling needs the optimizer. Use bfloat16",
        ),
        (
            "model.path",
            spec is not None and spec.moe is not None,
            "is a mixture of experts, and only dense models have been tested. Use a dense one",
        ),
    )
    for key, is_refused, text in refused:
        if is_refused:
            yield ConfigIssue(key, f"{text}{_OR_STATISTICS}", involves=(KEY,))


def replica_issues(config: Config, placement: ResolvedPlacement) -> Issues:
    """Yield settings of the roles on islands that a replica without an optimizer does not support."""
    replicated = ["actor"]
    if config.uses_critic and placement.colocated("critic", "actor"):
        replicated.append("critic")
    for role in replicated:
        section: TrainedConfig = getattr(config, role)
        messages: dict[str, str] = {}
        if section.engine == "fsdp":
            messages["engine"] = (
                "is fsdp, and the global model is a Megatron-core model. Use megatron"
            )
        if section.lora is not None:
            messages["lora"] = (
                "is set; gradients of adapters are small, and islands can sum them. Leave it out"
            )
        if section.freeze:
            messages["freeze"] = (
                "is set, and gradients of all weights are summed. Leave it out"
            )
        for name in ("use_distributed_optimizer", "overlap_param_gather"):
            if name in section.ddp:
                messages[f"ddp.{name}"] = (
                    "is set, and the islands have no optimizer. Leave it out"
                )
        for name in section.megatron:
            if name.startswith(("fp8", "fp4")):
                messages[f"megatron.{name}"] = (
                    "is set, and weights are sent in model.dtype. Leave it out"
                )
        for key, text in messages.items():
            yield ConfigIssue(
                f"{role}.{key}", f"{text}{_OR_STATISTICS}", involves=(KEY,)
            )
