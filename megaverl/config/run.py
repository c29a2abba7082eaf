"""Sections of the run, its model and its data, and of every kind of training."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SerializerFunctionWrapHandler, model_serializer
from pydantic_core import PydanticCustomError

from megaverl.config.errors import ConfigIssue, conflict_issues, listed, yaml_text
from megaverl.config.section import (
    AS_LIST,
    Function,
    Issues,
    LearningRate,
    Minutes,
    NonNegative,
    Passthrough,
    Paths,
    Positive,
    PositiveFloat,
    Section,
    Several,
    Text,
    known_or_own,
    rule,
)
from megaverl.config.watching import ProfileConfig
from megaverl.rewards import reward_names

TRACKERS = ("jsonl", "csv", "tensorboard", "wandb", "mlflow", "swanlab")
Backend = Annotated[str, known_or_own(TRACKERS, "module:object")]


def _names_a_folder(name: str) -> str:
    """Refuse a run name that is not a new folder's name, or that is too long for a file system."""
    if name in (".", ".."):
        raise PydanticCustomError("folder_name", "names a folder that exists already. Use a word, such as first_try")
    if len(name.encode("utf-8", "surrogatepass")) > MOST_NAME_BYTES:
        raise PydanticCustomError("folder_name", f"is longer than {MOST_NAME_BYTES} bytes")
    return name


# File systems allow 255 bytes. Files beside the folder add an ending to its name.
MOST_NAME_BYTES = 200
RunName = Annotated[str, Field(min_length=1, pattern=r"^[\w.+=,@-]+$"), AfterValidator(_names_a_folder)]


class RunConfig(Section):
    """`run`: name, folder, seed and processes."""

    name: RunName = "run"
    """Names the run folder."""
    dir: Text = "runs"
    """Folder of all runs; this one writes to dir/name."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Every random draw comes from it."""
    nproc: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Processes that the command starts on this machine when torchrun did not. null: one per GPU; without a GPU, as
    many as the grids need."""
    hardware: Text | None = None
    """What keys that are `auto` are chosen for: h100 or another name that `megaverl plan --hardware` knows, or a file
    of one's own. null: the GPU that this machine shows, or two processor cores."""
    replan: bool = False
    """Take the better layout that trainer.replan_every finds: at the next checkpoint the run ends its processes and
    goes on from it in new ones. Only keys that are `auto` change."""
    timeout_minutes: Minutes = 10.0
    """How long a rank waits for the others before it stops."""
    log_with: Annotated[list[Backend], AS_LIST] = ["jsonl", "tensorboard"]
    """Where metrics go: jsonl (always written), csv, tensorboard, wandb, mlflow, swanlab, or a class of your own as
    module:object. Several at once."""
    track_metrics: Annotated[list[str], BeforeValidator(lambda v: v.split(",") if isinstance(v, str) else v)] = ["*"]
    """Which metrics go there: patterns such as reward/*; metrics.jsonl has all. Also --track_metrics."""
    stragglers_every: NonNegative = 0
    """Compare the ranks' own work every so many steps, without what they wait, and name those that are slower than
    others at the same. 0: never. On GPUs their kernels are timed, which needs nvidia-resiliency-ext."""
    profile: ProfileConfig = ProfileConfig()
    """What is recorded of chosen steps."""


class ModelConfig(Section):
    """`model`: the Hugging Face folder that training starts from, or the name of a model on a hub."""

    may_be_text: ClassVar[bool] = True

    path: str = ""
    """Folder with config.json, safetensors and a tokenizer; or a model on a hub, as org/name: its weights are loaded
    while they arrive."""
    hub: Literal["huggingface", "modelscope"] = "huggingface"
    """Where org/name is looked for; modelscope needs the package of that name."""
    revision: Text | None = None
    """Branch, tag or commit of model.path on the hub. null: its main branch."""
    offload_folder: Text | None = None
    """Keep what is downloaded in this folder. null: in the hub's own cache."""
    config: Text | None = None
    """A config.json, named from the folder of the YAML file; `megaverl plan` reads it where model.path is not here."""
    tokenizer: Text | None = None
    """Folder of a Hugging Face tokenizer, or a sentencepiece .model file. null: model.path."""
    init: Literal["weights", "random"] = "weights"
    """weights: read the safetensors. random: fresh weights, from run.seed."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: bfloat16 on a GPU, float32 on a CPU."""
    trust_remote_code: bool = False
    """Let transformers and vLLM run Python files that come with the model, with your rights. Without it none is
    downloaded from a hub."""

    @rule
    def check_path(self, at: str) -> Issues:
        """Refuse a run without a model."""
        if not self.path:
            yield ConfigIssue(f"{at}.path", f"is not set. Give a Hugging Face folder: {at}.path=DIR.")


class SourceConfig(Section):
    """One source of prompts: a file, folder, data set or task."""

    may_be_text: ClassVar[bool] = True

    path: Text
    """A JSONL or Parquet file, a pattern of such, a folder of them or one of datasets.save_to_disk, a data set on the
    hub as org/name (needs the package datasets), a task of reasoning-gym as reasoning_gym:NAME?size=1000&seed=1, a
    taskset of verifiers as verifiers:NAME?size=1000, or your own as module:object."""
    weight: PositiveFloat | None = None
    """Its share of the prompts, over the sum of all weights. null, for all sources: as many as it has rows."""
    split: Text = "train"
    """Of a data set on the hub or of save_to_disk."""
    subset: Text | None = None
    """Configuration of a data set on the hub."""
    revision: Text | None = None
    """Of a data set on the hub: a commit, tag or branch. null: the newest."""
    limit: Positive | None = None
    """Only its first rows, so many."""

    @model_serializer(mode="wrap")
    def _short(self, handler: SerializerFunctionWrapHandler) -> Any:
        """Write a source without other settings as its path alone."""
        values = handler(self)
        return self.path if self == SourceConfig(path=self.path) else values

    def __str__(self) -> str:
        return self.path


def _as_sources(value: Any) -> Any:
    """Return a list of source mappings for one source or several, each a path or a mapping."""
    entries = value if isinstance(value, list) else [value]
    return [{"path": entry} if isinstance(entry, str) else entry for entry in entries]


# A single source may stand without the list, and its path without the mapping: `data.train=train.jsonl`.
Sources = Annotated[list[SourceConfig], BeforeValidator(_as_sources)]


class ImagesConfig(Section):
    """`data.images`: images of prompts, for models that take them."""

    key: Text = "images"
    """Column of a row's images: one, or a list. Each takes the place of <image> in the prompt, or of a part of type
    image that has none of its own; without such they stand before the text. Paths are named from the data file."""
    max_per_prompt: Positive = 8
    """Most images of a prompt."""
    max_pixels: Positive = 33_554_432
    """Most pixels of an image as it is stored; a larger one is refused before it is decoded."""
    max_bytes: Positive = 67_108_864
    """Most bytes of an image as it is stored."""
    allow_urls: bool | list[Text] = False
    """Fetch images that are named by http(s) URLs: true, from every host with a public address; a list of hosts, from
    these alone, whatever their addresses. The same holds of where a redirect leads. false: they are refused."""
    processor: Passthrough = {}
    """Options of the model's image processor, such as min_pixels and max_pixels, between which images are resized."""


class DataConfig(Section):
    """`data`: prompts, from files or data sets."""

    train: Sources = []
    """Training prompts."""
    validation: Sources = []
    """Held-out prompts."""
    prompt_key: Text = "prompt"
    """Column of the prompt: text, or a list of chat messages."""
    answer_key: Text = "answer"
    """Column of the reference answer that the reward sees."""
    system_prompt: str | None = None
    """Put before every prompt as the system message."""
    chat_template: Literal["auto", "none"] = "auto"
    """auto: the tokenizer's chat template where it has one. none: the text as it stands."""
    tools_key: Text = "tools"
    """Column of the tools that the chat template is shown, where a row has it."""
    tools: Text | None = None
    """JSON file with the tools of every row that has none of its own."""
    images: ImagesConfig = ImagesConfig()
    """Of models that take images."""
    min_prompt_tokens: NonNegative = 0
    """A shorter prompt is dropped, and counted."""
    max_prompt_tokens: Positive = 512
    """Longest prompt. Where this or rollout.sampling.max_tokens is not given and the model's context is smaller, what
    fits it is chosen."""
    too_long: Literal["error", "drop", "truncate_left"] = "error"
    """What is done with a longer prompt; truncate_left keeps its last tokens."""
    prompts_per_step: Annotated[int, Field(ge=1, le=10_000_000)] = 64
    """Prompts in one training step."""
    shuffle: bool = True
    """Shuffle the training prompts, anew in every epoch, from run.seed."""
    streaming: bool = False
    """Read the training prompts as they are needed, instead of all once at the start: for data sets too large to be
    looked through, or that arrive over a network. A bad row is then found when it comes."""
    shuffle_buffer: Positive = 1024
    """With streaming: rows that are shuffled among each other, and held in memory."""


class RewardConfig(Section):
    """One entry of `reward`; the reward is the weighted sum of all entries."""

    name: Text | None = None
    """A built-in reward, or a label for a function or a model."""
    function: Text | None = None
    """Your own: module:function, or path/to/file.py:function."""
    path: Text | None = None
    """A reward model: a Hugging Face folder of a sequence classifier with one label, as `megaverl reward` writes. A
    response is correct where it gives more than 0."""
    engine: Literal["megatron", "transformers"] = "megatron"
    """Of a reward model. megatron: on the grid of `reward_model`. transformers: any classifier that transformers knows,
    with a tokenizer and chat template of its own, whole on every rank; never trained."""
    weight: Annotated[float, Field(ge=-1e9, le=1e9)] = 1.0
    """Factor in the sum."""
    batched: bool = False
    """The function takes and returns lists."""
    accuracy: bool = False
    """A response is correct where this one gives 1 or more. None marked: the first. Where that one cannot give 1, no
    accuracy and no pass@k are shown."""
    only_if: Text | None = None
    """Name of a reward before this one: where that gives less than 1, this one is not asked, and is 0."""
    shape: Function | None = None
    """Your own, module:function, called with this one's number; what it returns takes its place."""
    clip: list[Annotated[float, Field(ge=-1e9, le=1e9)]] | None = None
    """The least and the most that it can be, after shape and before weight: [0, 1]."""
    options: Passthrough = {}
    """Keyword arguments of the reward. An entry may also be written as {NAME: options}, with weight and the like
    beside it: {judge: {url: ..., model: ...}, weight: 0.5}; {url: ..., model: ..., token_env: ...} alone is a reward
    model behind `megaverl serve reward`."""

    @property
    def label(self) -> str:
        """Name of the reward in metrics."""
        return self.name or ("reward_model" if self.path else str(self.function).rpartition(":")[2])

    @rule
    def check_kind(self, at: str) -> Issues:
        """Refuse an entry that is no rule, function or model, and settings that its kind does not have."""
        if self.path is not None:
            fields = ("function", "batched", "accuracy", "options", "only_if", "shape", "clip")
            for name in self.changed(*fields):
                yield ConfigIssue(f"{at}.{name}", f"is set, and so is {at}.path; a model has none. Leave it out.")
        elif self.engine != "megatron":
            text = "is set, and there is no path. It is of a reward model: leave it out."
            yield ConfigIssue(f"{at}.engine", text)
        elif self.name is None and self.function is None:
            text = f"has neither name nor function, and no path. Built in: {listed(reward_names())}."
            yield ConfigIssue(at, text)
        elif self.function is not None and not all(self.function.rpartition(":")[::2]):
            text = f"found {yaml_text(self.function)}; expected module:function or path/to/file.py:function."
            yield ConfigIssue(f"{at}.function", text)

    @rule
    def check_clip(self, at: str) -> Issues:
        """Refuse limits that are not the least and the most."""
        if self.clip is not None and not (len(self.clip) == 2 and self.clip[0] < self.clip[1]):
            text = f"found {yaml_text(self.clip)}; expected the least and the most: [0, 1]."
            yield ConfigIssue(f"{at}.clip", text)


def rewards_as_list(value: Any) -> Any:
    """Return a list of reward mappings for one reward or several, each a text or a mapping."""
    entries = value if isinstance(value, list) else [value]
    return [named_reward(entry) if isinstance(entry, str) else _with_name(entry) for entry in entries]


def _with_name(entry: Any) -> Any:
    """Convert {NAME: {options}, ...} to {name: NAME, options: {...}, ...}, and {url: ...} to a served reward model."""
    if not isinstance(entry, dict) or entry.keys() & {"name", "function", "path", "options"}:
        return entry
    if "url" in entry:
        reward_keys = {key: value for key, value in entry.items() if key in RewardConfig.model_fields}
        return {
            **reward_keys,
            "name": "served",
            "options": {key: value for key, value in entry.items() if key not in reward_keys},
        }
    named = [key for key, value in entry.items() if key not in RewardConfig.model_fields and isinstance(value, dict)]
    if len(named) != 1:
        return entry
    others = {key: value for key, value in entry.items() if key != named[0]}
    return {"name": named[0], "options": entry[named[0]], **others}


def named_reward(name: str) -> dict[str, str]:
    """Return the mapping for a reward that is written as text: a built-in name, or module:function."""
    return {"function": name} if ":" in name else {"name": name}


class LoopConfig(Section):
    """`trainer`: length of the training loop, validation, and what it stores."""

    steps: Positive = 100
    """Training steps: each one rollout and its updates."""
    validate_every: NonNegative = 10
    """Steps between validations; 0: never, and the default without data.validation."""
    validate_at_start: bool = True
    """Validate before the first step as well."""
    validation_prompts: Positive | None = None
    """How many held-out prompts. null: all."""
    validation_samples: Several = 1
    """Responses per held-out prompt."""
    validation_sampling: Passthrough = {}
    """Fields of SamplingParams that differ in validation from rollout.sampling."""
    pass_at: Annotated[list[Positive], BeforeValidator(lambda v: [v] if isinstance(v, int) else v)] = [1]
    """The k of each pass@k; none above validation_samples."""
    replan_every: NonNegative = 0
    """Look for a better layout every so many steps, by the lengths and times that were measured, and say what it would
    gain (plan/gain). 0: never."""
    program: Function | None = None
    """A step of your own, as module:function: an async function of the run and the number of the step, in the place of
    PPO's or GRPO's. It calls the roles and returns the step's samples (docs/extend/program.md)."""
    operators: list[Function] = []
    """Functions of your own, as module:function, that add operators to the step's flow, to watch or to change what
    flows: each is called with the DataFlow (megaverl flow show)."""
    best_metric: Literal["accuracy", "reward"] = "accuracy"
    """Validation metric by which the best checkpoint is remembered. Where no response was correct yet, or none can be,
    the reward decides."""
    save_samples: NonNegative = 4
    """Sample generations written to the run folder at each step."""
    store_rollouts: bool = False
    """Store every step's responses and scores, for replay_rollouts, in dir/name/rollouts."""
    rollout_only: bool = False
    """Generate, score and store; train nothing. Also `megaverl train --rollout-only`."""
    replay_rollouts: Text | None = None
    """A folder of stored rollouts to train on, without an engine. Also --replay-rollouts PATH."""

    @rule
    def check_pass_at(self, at: str) -> Issues:
        """Refuse a pass@k of more samples than validation draws."""
        if any(k > self.validation_samples for k in self.pass_at):
            text = f"found {self.pass_at}; pass@k needs k samples, and {at}.validation_samples="
            involves = (f"{at}.validation_samples",)
            yield ConfigIssue(f"{at}.pass_at", f"{text}{self.validation_samples}.", involves=involves)

    @rule
    def check_program(self, at: str) -> Issues:
        """Refuse other changes of the step beside a step of the user's own."""
        if self.program is None:
            return
        why = "a program is the whole step"
        conflicts = (
            (f"{at}.operators", bool(self.operators), why),
            (f"{at}.rollout_only", self.rollout_only, why),
        )
        yield from conflict_issues(f"{at}.program", conflicts)

    @rule
    def check_stored_rollouts(self, at: str) -> Issues:
        """Refuse to generate rollouts and to replay stored ones in the same run."""
        if self.rollout_only and self.replay_rollouts is not None:
            text = f"is set, and so is {at}.replay_rollouts. Use one of them."
            yield ConfigIssue(f"{at}.rollout_only", text)


class SFTConfig(Section):
    """`sft`: supervised fine-tuning, with the actor's grid and optimizer."""

    train: Sources = []
    """Prompt/answer pairs. Empty: data.train."""
    steps: Positive = 100
    """Optimizer steps."""
    batch_size: Positive = 32
    """Pairs in one step, over all ranks."""
    lr: LearningRate = 1e-5
    """Highest learning rate."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "cosine"
    """How the learning rate falls to 0 after warm-up."""
    lr_warmup_steps: NonNegative = 0
    """Steps in which the learning rate rises from 0."""
    max_answer_tokens: Positive | None = None
    """Longest answer; a longer one is an error. null: rollout.sampling.max_tokens."""

    @rule
    def check_warmup(self, at: str) -> Issues:
        """Refuse a warm-up that is not shorter than the training."""
        yield from _warmup_issues(at, self.lr_warmup_steps, self.steps)


def _warmup_issues(at: str, warmup: int, steps: int) -> Issues:
    """Yield a mistake if the learning rate rises for `warmup` steps of a training of `steps` steps or fewer."""
    if warmup >= steps:
        text = f"found {warmup}; expected below {at}.steps={steps}."
        yield ConfigIssue(f"{at}.lr_warmup_steps", text, involves=(f"{at}.steps",))


# Values of `checkpoint.resume` that are not a folder.
RESUME_WORDS = ("auto", "latest", "unfinished", "never")


class CheckpointConfig(Section):
    """`checkpoint`: when checkpoints are written, which are kept, and which one a run resumes from."""

    save_interval: NonNegative = 0
    """Steps between checkpoints; 0: only after the last step."""
    keep_last_k: Positive = 3
    """How many are kept, besides the best one and milestones."""
    keep_best: bool = True
    """Keep the one with the best validation as well."""
    milestone_interval: NonNegative = 0
    """Checkpoints of every so many steps are kept for good; 0: none."""
    async_save: bool = True
    """Write beside the training; an update waits for a copy, in host memory, of what is not written yet."""
    on_write_error: Literal["stop", "continue"] = "stop"
    """A checkpoint that cannot be written: stop ends the run, continue says so and goes on. The ones before it are kept
    either way."""
    resume: Text = "auto"
    """auto: the newest of this run folder, if any. latest: the same, and it must be there. unfinished: the newest of
    this run folder where that run has steps left, and a finished run starts anew. never: start anew. Or a checkpoint
    folder. Also `megaverl train --resume`."""
    export_hf: bool = True
    """Write a Hugging Face folder at the end."""


class PreferenceConfig(Section):
    """`preference`: pairs of a better and a worse response, for `megaverl dpo` and `megaverl reward`."""

    train: Paths = []
    """Files of rows with a prompt and two responses; for loss: kto and bco also with one and its label."""
    validation: Paths = []
    """Files of held-out rows."""
    chosen_key: Text = "chosen"
    """Column of the better response: text, or chat messages."""
    rejected_key: Text = "rejected"
    """Column of the worse one."""
    completion_key: Text = "completion"
    """With loss: kto or bco, in rows that have no pair: column of a single response."""
    label_key: Text = "label"
    """Column of whether that one is desirable: true or false."""
    margin_key: Text | None = None
    """Column of how much better it is, of `megaverl reward` (arXiv 2307.09288)."""
    loss: str = "dpo"
    """Of `megaverl dpo`: dpo, ipo, hinge, robust, exo, nca, sppo, apo_zero, apo_down, discopop, f_dpo, wpo, aot,
    aot_unpaired; without a reference simpo, orpo, cpo, alphapo; of single responses kto, bco; or module:function of
    your own."""
    options: Passthrough = {}
    """Options of the loss, such as beta."""
    steps: Positive = 100
    """Optimizer steps."""
    batch_size: Positive = 32
    """Rows in one step, over all ranks."""
    lr: LearningRate = 1e-6
    """Highest learning rate."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "cosine"
    """How the learning rate falls to 0 after warm-up."""
    lr_warmup_steps: NonNegative = 0
    """Steps in which the learning rate rises from 0."""
    validate_every: NonNegative = 0
    """Steps between validations; 0: at the end."""
    max_response_tokens: Positive | None = None
    """Longest response; a longer one is an error. null: rollout.sampling.max_tokens."""

    @rule
    def check_warmup(self, at: str) -> Issues:
        """Refuse a warm-up that is not shorter than the training."""
        yield from _warmup_issues(at, self.lr_warmup_steps, self.steps)

    @rule
    def check_validation(self, at: str) -> Issues:
        """Refuse validation without held-out pairs."""
        if self.validate_every and not self.validation:
            text = f"is set, but {at}.validation is empty. Give held-out pairs."
            yield ConfigIssue(f"{at}.validate_every", text)


class MixConfig(Section):
    """One entry of `mix`: an additional update in the training step, on the responses that it generated and scored."""

    update: Literal["rejection", "preference", "reward_model", "sft"] | None = None
    """rejection: cross-entropy on the best response of each group (RAFT, best-of-n). preference: `preference.loss` on
    the best and the worst of each group. reward_model: pairs of the same train the learned reward. sft: cross-entropy
    on the prompts' reference answers."""
    every: Positive = 1
    """In each so-many-th step."""
    weight: PositiveFloat = 1.0
    """Factor on the loss."""
    judge: Text = "reward"
    """What best and worst go by: reward (the weighted sum), accuracy, or one reward by its name."""

    @rule
    def check_update(self, at: str) -> Issues:
        """Refuse an entry without a kind of update, and a judge of an update that judges nothing."""
        if self.update is None:
            yield ConfigIssue(f"{at}.update", "is not set. Known: rejection, preference, reward_model, sft.")
        if self.update == "sft" and self.changed("judge"):
            text = "is set, and sft learns the rows' own answers: nothing is judged. Leave it out."
            yield ConfigIssue(f"{at}.judge", text)


REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def is_hub_name(path: str) -> bool:
    """Return whether `path` looks like `org/name` and no file or folder of that name exists."""
    return REPOSITORY.fullmatch(path) is not None and not Path(path).exists()
