"""`run`, `model`, `data`, `reward`: what is trained, on what, and where the results go."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from megaverl.config.section import Passthrough, Paths, Positive, PositiveFloat, Section

Backend = Literal["jsonl", "csv", "tensorboard", "wandb", "mlflow", "swanlab"]


def _default_backends() -> list[Backend]:
    return ["jsonl", "tensorboard"]


class RunConfig(Section):
    """`run`: name, folder, seed and processes."""

    name: str = Field(default="run", min_length=1, pattern=r"^[\w.+=,@-]+$", description="Names the run folder.")
    dir: str = Field(default="runs", min_length=1, description="Folder of all runs; this one writes to dir/name.")
    seed: int = Field(default=0, ge=0, lt=2**31, description="Every random draw comes from it.")
    nproc: Positive | None = Field(
        default=None,
        description="Processes that the command starts on this machine when torchrun did not. "
        "null: one per GPU; without a GPU, as many as the grids need.",
    )
    timeout_minutes: PositiveFloat = Field(
        default=10.0, description="How long a rank waits for the others before it stops."
    )
    log_with: Annotated[list[Backend], BeforeValidator(lambda v: [v] if isinstance(v, str) else v)] = Field(
        default_factory=_default_backends,
        description="Where metrics go; jsonl is always written.",
    )


class ModelConfig(Section):
    """`model`: the Hugging Face folder that training starts from, or its name on a hub."""

    path: str = Field(
        default="",
        description="Folder with config.json, safetensors and a tokenizer; or a model on a hub, as org/name: its "
        "weights are loaded while they arrive.",
    )
    hub: Literal["huggingface", "modelscope"] = Field(
        default="huggingface", description="Where org/name is looked for; modelscope needs the package of that name."
    )
    revision: str | None = Field(
        default=None, min_length=1, description="Branch, tag or commit of model.path on the hub. null: its main branch."
    )
    offload_folder: str | None = Field(
        default=None, min_length=1, description="Keep what is downloaded in this folder. null: in the hub's own cache."
    )
    config: str | None = Field(
        default=None,
        min_length=1,
        description="A config.json, named from the folder of the YAML file; `megaverl plan` reads it where "
        "model.path is not here.",
    )
    tokenizer: str | None = Field(
        default=None,
        description="Folder of a Hugging Face tokenizer, or a sentencepiece .model file. null: model.path.",
    )
    init: Literal["weights", "random"] = Field(
        default="weights", description="weights: read the safetensors. random: fresh weights, from run.seed."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="auto: bfloat16 on a GPU, float32 on a CPU."
    )
    trust_remote_code: bool = Field(
        default=False,
        description="Let transformers and vLLM run Python files that come with the model, with your rights. "
        "Without it none is downloaded from a hub.",
    )


class DataConfig(Section):
    """`data`: prompts, JSONL or Parquet."""

    train: Paths = Field(default_factory=list, description="Files of training prompts.")
    validation: Paths = Field(default_factory=list, description="Files of held-out prompts.")
    prompt_key: str = Field(default="prompt", description="Column of the prompt: text, or a list of chat messages.")
    answer_key: str = Field(default="answer", description="Column of the reference answer that the reward sees.")
    system_prompt: str | None = Field(default=None, description="Put before every prompt as the system message.")
    chat_template: Literal["auto", "none"] = Field(
        default="auto",
        description="auto: the tokenizer's chat template where it has one. none: the text as it stands.",
    )
    max_prompt_tokens: Positive = Field(default=512, description="Longest prompt.")
    too_long: Literal["error", "drop", "truncate_left"] = Field(
        default="error", description="What is done with a longer prompt; truncate_left keeps its last tokens."
    )
    prompts_per_step: Positive = Field(default=64, description="Prompts in one training step.")
    shuffle: bool = Field(default=True, description="Shuffle the training prompts, anew in every epoch, from run.seed.")


class RewardConfig(Section):
    """One entry of `reward`; the reward is the weighted sum of all entries."""

    name: str | None = Field(default=None, description="A built-in reward, or a label for a function.")
    function: str | None = Field(default=None, description="Your own: module:function, or path/to/file.py:function.")
    weight: float = Field(default=1.0, description="Factor in the sum.")
    batched: bool = Field(default=False, description="The function takes and returns lists.")
    accuracy: bool = Field(
        default=False,
        description="A response is correct where this one gives 1 or more. None marked: the first.",
    )
    options: Passthrough = Field(default_factory=dict, description="Keyword arguments of the reward.")


def rewards_as_list(value: Any) -> Any:
    """One reward may stand alone: by its name, or as one mapping."""
    entries = value if isinstance(value, list) else [value]
    return [{"name": entry} if isinstance(entry, str) else entry for entry in entries]
