"""Paths of other trainers' examples, and the recipe, command or page that replaces each.

Articles and scripts name files such as `examples/grpo_trainer/run_qwen2_5_vl-7b.sh`,
which exist in verl's repository. The command line answers with the replacement, and
docs/from_the_articles.md shows the whole table.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from typing import Any, NamedTuple


class Successor(NamedTuple):
    """Replacement for the files that match a pattern.

    Attributes:
        pattern: pattern of the path inside the other repository, in lower case.
        command: command of megaverl that does the work.
        recipe: name of the recipe, as `megaverl recipes` lists it, or "" if none is needed.
        note: what else to know, as a sentence or two.
    """

    pattern: str
    command: str
    recipe: str
    note: str

    @property
    def line(self) -> str:
        """Command line that replaces the file."""
        return f"megaverl {self.command}" + (
            f" --config configs/{self.recipe}.yaml" if self.recipe else ""
        )


SMALL = "gsm8k_smollm2"
GEOMETRY = "qwen2_5_vl/grpo_geometry"
SPLIT = "Add run.nproc=4 and placement={actor_devices: [0, 1], critic_devices: [2, 3]}."
AHEAD = "Add run.nproc=4, rollout.async_rollout=true and placement={actor_devices: [0, 1], rollout_devices: [2, 3]}."
# The first pattern that matches wins, so that special cases come before their folder.
SUCCESSORS = (
    Successor(
        "examples/ppo_trainer/*70b*",
        "train",
        "llama3_70b/ppo_16_nodes",
        "Any Llama or Qwen of this size fits.",
    ),
    Successor(
        "examples/ppo_trainer/*",
        "train",
        f"{SMALL}/ppo",
        "Set model.path and data.train to yours.",
    ),
    Successor(
        "examples/grpo_trainer/*vl*",
        "train",
        GEOMETRY,
        "Its actor is under FSDP2; actor.engine: megatron trains the same models.",
    ),
    Successor(
        "examples/grpo_trainer/*235b*", "train", "qwen3_235b_a22b/grpo_64_nodes", ""
    ),
    Successor("examples/grpo_trainer/*70b*", "train", "llama3_70b/grpo_8_nodes", ""),
    Successor(
        "examples/grpo_trainer/*gpt_oss*", "train", "gpt_oss_20b/grpo_1_node", ""
    ),
    Successor(
        "examples/grpo_trainer/*megatron*",
        "train",
        f"{SMALL}/grpo_pp2",
        "actor.tp, pp, cp, ep: the grid.",
    ),
    Successor(
        "examples/grpo_trainer/*lora*",
        "train",
        "qwen2_5_7b/grpo_fsdp_1_node",
        "Add actor.lora.rank=16.",
    ),
    Successor("examples/grpo_trainer/*", "train", "qwen2_5_7b/grpo_fsdp_1_node", ""),
    Successor(
        "examples/sft/*sp2*liger*",
        "sft",
        f"{SMALL}/sft",
        "Add actor.engine=fsdp, actor.pp=1, actor.cp=2 (sequence parallel size 2) and actor.fsdp.liger=true, which "
        "needs a GPU.",
    ),
    Successor("examples/sft/*peft*", "sft", f"{SMALL}/sft", "Add actor.lora.rank=16."),
    Successor("examples/sft/*", "sft", f"{SMALL}/sft", ""),
    Successor("examples/rloo_trainer/*", "train", f"{SMALL}/rloo", ""),
    Successor("examples/remax_trainer/*", "train", f"{SMALL}/remax", ""),
    Successor(
        "examples/reinforce_plus_plus_trainer/*baseline*",
        "train",
        f"{SMALL}/reinforce_plus_plus_baseline",
        "",
    ),
    Successor(
        "examples/reinforce_plus_plus_trainer/*",
        "train",
        f"{SMALL}/reinforce_plus_plus",
        "",
    ),
    Successor("examples/gpg_trainer/*", "train", f"{SMALL}/gpg", ""),
    Successor("examples/gmpo_trainer/*", "train", f"{SMALL}/gmpo", ""),
    Successor("examples/gspo_trainer/*", "train", f"{SMALL}/gspo", ""),
    Successor("examples/sapo_trainer/*", "train", f"{SMALL}/sapo", ""),
    Successor("examples/cispo_trainer/*", "train", f"{SMALL}/cispo", ""),
    Successor("examples/dppo_trainer/*", "train", f"{SMALL}/dppo_tv", ""),
    Successor("examples/gdpo_trainer/*", "train", f"{SMALL}/gdpo", ""),
    Successor("examples/otb_trainer/*", "train", f"{SMALL}/optimal_token_baseline", ""),
    Successor(
        "examples/sglang_multiturn/*",
        "train",
        "games/calculator_tool",
        "SGLang: rollout.servers.kind: sglang.",
    ),
    Successor("examples/split_placement/*", "train", f"{SMALL}/ppo", SPLIT),
    Successor(
        "examples/data_preprocess/*",
        "data check",
        "",
        "Rows are read as published: data.train=suite:gsm8k.",
    ),
    Successor(
        "examples/generation/*",
        "generate",
        "",
        "Add model.path=DIR and --prompts FILE.",
    ),
    Successor(
        "examples/tuning/*",
        "plan",
        "",
        "It predicts memory and time of any configuration.",
    ),
    Successor("recipe/dapo*", "train", f"{SMALL}/dapo", ""),
    Successor("recipe/prime*", "train", f"{SMALL}/prime", ""),
    Successor("recipe/entropy/*clip*", "train", f"{SMALL}/clip_cov", ""),
    Successor("recipe/entropy*", "train", f"{SMALL}/kl_cov", ""),
    Successor("recipe/gkd*", "train", f"{SMALL}/gkd", ""),
    Successor("recipe/spin*", "train", f"{SMALL}/online_dpo", ""),
    Successor(
        "recipe/sppo*", "dpo", "preferences_smollm2/dpo", "Add preference.loss=sppo."
    ),
    Successor(
        "recipe/retool*",
        "train",
        "games/calculator_tool",
        "Python as a tool: environment.options.tools.",
    ),
    Successor("recipe/r1*", "eval", "", "Add --suite aime,gpqa,code,math."),
    Successor("recipe/one_step_off_policy*", "train", f"{SMALL}/ppo", AHEAD),
    Successor("recipe/fully_async_policy*", "train", f"{SMALL}/ppo", AHEAD),
    Successor("recipe/*", "recipes", "", "It lists every recipe."),
    Successor(
        "scripts/*model_merger*",
        "convert",
        "",
        "It converts between Megatron and Hugging Face folders.",
    ),
    Successor(
        "scripts/*install*",
        "doctor",
        "",
        "launch/bootstrap.sh installs; the doctor checks.",
    ),
    Successor(
        "verl/model_merger*",
        "convert",
        "",
        "It converts between Megatron and Hugging Face folders.",
    ),
    Successor("*trainer/config/ppo_megatron_trainer.yaml", "train", f"{SMALL}/ppo", ""),
    Successor("*trainer/config/ppo_trainer.yaml", "train", f"{SMALL}/ppo", ""),
    Successor("*trainer/config/sft_trainer*.yaml", "sft", f"{SMALL}/sft", ""),
    Successor(
        "*trainer/config/generation.yaml",
        "generate",
        "",
        "Add model.path=DIR and --prompts FILE.",
    ),
    Successor(
        "*trainer/config/evaluation.yaml", "eval", "", "Add --suite or --config."
    ),
    Successor("verl.trainer.main_ppo", "train", f"{SMALL}/ppo", ""),
    Successor(
        "verl.trainer.main_generation*",
        "generate",
        "",
        "Add model.path=DIR and --prompts FILE.",
    ),
    Successor("verl.trainer.main_eval", "eval", "", "Add --suite or --config."),
    Successor("verl.trainer.*sft_trainer*", "sft", f"{SMALL}/sft", ""),
    Successor(
        "verl.model_merger*",
        "convert",
        "",
        "It converts between Megatron and Hugging Face folders.",
    ),
)
# Folders at which the path inside the other repository begins.
ROOTS = ("examples/", "recipe/", "scripts/", "verl/")


def find_successor(path: str) -> Successor | None:
    """Return the replacement for a path of another trainer's repository, or None."""
    plain = path.lower().replace("\\", "/").removeprefix("./")
    begins = [
        plain.find(root)
        for root in ROOTS
        if plain.startswith(root) or f"/{root}" in plain
    ]
    # A path may lie inside a clone: clones/verl/examples/ppo_trainer/run.sh.
    inner = [plain[begin:] for begin in sorted(begins, reverse=True)]
    for candidate in [*inner, plain]:
        for successor in SUCCESSORS:
            if fnmatch(candidate, successor.pattern):
                return successor
    return None


def successor_sentence(path: str) -> str:
    """Return a sentence that names the replacement for another trainer's path, or "" if there is none."""
    successor = find_successor(path)
    if successor is None:
        return ""
    note = f" {successor.note}" if successor.note else ""
    return f"It is of another trainer, and `{successor.line}` replaces it.{note}"


# (Key, value) of another trainer -> the settings that replace it.
VALUES: dict[tuple[str, str], str] = {
    (
        "rollout.engine",
        "sglang",
    ): "SGLang runs as a server: rollout.engine=server with rollout.servers.kind=sglang and "
    "rollout.servers.urls (docs/servers.md).",
    (
        "rollout.engine",
        "trtllm",
    ): "Use vllm, or rollout.engine=server with a server of vLLM or SGLang.",
    ("actor.engine", "fsdp2"): "Use fsdp, which is FSDP2.",
    ("actor.engine", "deepspeed"): "Use fsdp, which shards like ZeRO-3.",
    ("critic.engine", "fsdp2"): "Use fsdp, which is FSDP2.",
    ("critic.engine", "deepspeed"): "Use fsdp, which shards like ZeRO-3.",
}


def value_hint(path: Sequence[str], value: Any) -> str:
    """Return a sentence about a value that another trainer has for this key, or ""."""
    hint = (
        VALUES.get((".".join(path), value.lower())) if isinstance(value, str) else None
    )
    return f" {hint}" if hint else ""
