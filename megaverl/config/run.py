"""`run`, `model`, `data`, `reward`: what is trained, on what, and where the results go."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from megaverl.config.data_sources import Sources
from megaverl.config.section import NonNegative, Passthrough, Positive, PositiveFloat, Section

TRACKERS = ("jsonl", "csv", "tensorboard", "wandb", "mlflow", "swanlab")


def _known_tracker(value: str) -> str:
    """One of `TRACKERS`, or a class of the user's own: module:object, file.py:object."""
    if value not in TRACKERS and not all(value.rpartition(":")[::2]):
        # in pydantic's own words for a Literal, so that the message and its hint are the same
        raise PydanticCustomError(
            "literal_error", "no such tracker", {"expected": ", ".join([*TRACKERS, "module:object"])}
        )
    return value


Backend = Annotated[str, AfterValidator(_known_tracker)]


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
        description="Where metrics go: jsonl (always written), csv, tensorboard, wandb, mlflow, swanlab, or a class of "
        "your own as module:object. Several at once.",
    )
    track_metrics: Annotated[list[str], BeforeValidator(lambda v: v.split(",") if isinstance(v, str) else v)] = Field(
        default_factory=lambda: ["*"],
        description="Which metrics go there: patterns such as reward/*; metrics.jsonl has all. Also --track_metrics.",
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
    """`data`: prompts, from files or data sets."""

    train: Sources = Field(default_factory=list, description="Training prompts.")
    validation: Sources = Field(default_factory=list, description="Held-out prompts.")
    prompt_key: str = Field(default="prompt", description="Column of the prompt: text, or a list of chat messages.")
    answer_key: str = Field(default="answer", description="Column of the reference answer that the reward sees.")
    system_prompt: str | None = Field(default=None, description="Put before every prompt as the system message.")
    chat_template: Literal["auto", "none"] = Field(
        default="auto",
        description="auto: the tokenizer's chat template where it has one. none: the text as it stands.",
    )
    tools_key: str = Field(
        default="tools", description="Column of the tools that the chat template is shown, where a row has it."
    )
    tools: str | None = Field(
        default=None, min_length=1, description="JSON file with the tools of every row that has none of its own."
    )
    min_prompt_tokens: NonNegative = Field(default=0, description="A shorter prompt is dropped, and counted.")
    max_prompt_tokens: Positive = Field(
        default=512,
        description="Longest prompt. Where this or rollout.sampling.max_tokens is not given and the model's context "
        "is smaller, what fits it is chosen.",
    )
    too_long: Literal["error", "drop", "truncate_left"] = Field(
        default="error", description="What is done with a longer prompt; truncate_left keeps its last tokens."
    )
    prompts_per_step: Positive = Field(default=64, description="Prompts in one training step.")
    shuffle: bool = Field(default=True, description="Shuffle the training prompts, anew in every epoch, from run.seed.")
    streaming: bool = Field(
        default=False,
        description="Read the training prompts as they are needed, instead of all once at the start: for data sets "
        "too large to be looked through, or that arrive over a network. A bad row is then found when it comes.",
    )
    shuffle_buffer: Positive = Field(
        default=1024, description="With streaming: rows that are shuffled among each other, and held in memory."
    )


class RewardConfig(Section):
    """One entry of `reward`; the reward is the weighted sum of all entries."""

    name: str | None = Field(default=None, description="A built-in reward, or a label for a function or a model.")
    function: str | None = Field(default=None, description="Your own: module:function, or path/to/file.py:function.")
    path: str | None = Field(
        default=None,
        min_length=1,
        description="A reward model: a Hugging Face folder of a sequence classifier with one label, as `megaverl "
        "reward` writes. A response is correct where it gives more than 0.",
    )
    engine: Literal["megatron", "transformers"] = Field(
        default="megatron",
        description="Of a reward model. megatron: on the grid of `reward_model`. transformers: any classifier that "
        "transformers knows, with a tokenizer and chat template of its own, whole on every rank; never trained.",
    )
    weight: float = Field(default=1.0, description="Factor in the sum.")
    batched: bool = Field(default=False, description="The function takes and returns lists.")
    accuracy: bool = Field(
        default=False,
        description="A response is correct where this one gives 1 or more. None marked: the first.",
    )
    options: Passthrough = Field(default_factory=dict, description="Keyword arguments of the reward.")

    @property
    def label(self) -> str:
        """What metrics call it."""
        return self.name or ("reward_model" if self.path else str(self.function).rpartition(":")[2])


def rewards_as_list(value: Any) -> Any:
    """One reward may stand alone; as a mapping, or as text."""
    entries = value if isinstance(value, list) else [value]
    return [named_reward(entry) if isinstance(entry, str) else entry for entry in entries]


def named_reward(name: str) -> dict[str, str]:
    """The entry for a built-in reward, or, with a colon, for a function: module:function, file.py:function."""
    return {"function": name} if ":" in name else {"name": name}
