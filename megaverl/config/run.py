"""Sections of the run, its model and its data, and of every kind of training."""

from __future__ import annotations

import importlib.util
import os
import re
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
)
from pydantic_core import PydanticCustomError

from megaverl.config.errors import ConfigIssue, conflict_issues
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
from megaverl.config.wording import listed, yaml_text
from megaverl.rewards import reward_names

TRACKERS = ("jsonl", "csv", "tensorboard", "wandb", "mlflow", "swanlab", "trackio")
Backend = Annotated[str, known_or_own(TRACKERS, "module:object")]


def _names_a_folder(name: str) -> str:
    """Refuse a run name that is not a new folder's name, or that is too long for a file system."""
    if name in (".", ".."):
        raise PydanticCustomError(
            "folder_name",
            "names a folder that exists already. Use a word, such as first_try",
        )
    if len(name.encode("utf-8", "surrogatepass")) > MOST_NAME_BYTES:
        raise PydanticCustomError(
            "folder_name", f"is longer than {MOST_NAME_BYTES} bytes"
        )
    return name


# File systems allow 255 bytes. Files beside the folder add an ending to its name.
MOST_NAME_BYTES = 200
RunName = Annotated[
    str, Field(min_length=1, pattern=r"^[\w.+=,@-]+$"), AfterValidator(_names_a_folder)
]


class RunConfig(Section):
    """`run`: name, folder, seed and processes."""

    name: RunName = "run"
    """Name of the run folder. A second run of the same name resumes the first one; see checkpoint.resume."""
    dir: Text = "runs"
    """Folder of all runs. This run writes to dir/name."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of every random draw. A resumed run cannot change it."""
    nproc: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Number of processes that the command starts on this machine if torchrun did not start it. null: one per GPU;
    without a GPU, as many as the grids need."""
    hardware: Text | None = None
    """Hardware for which keys set to `auto` are chosen: h100 or another name of `megaverl plan --hardware`, or a file
    of your own. null: the GPU of this machine, or two processor cores."""
    timeout_minutes: Minutes = 10.0
    """How long a rank waits for the others before the run stops. The message names the rank that did not answer. Raise
    it if a stage can legitimately take longer."""
    log_with: Annotated[list[Backend], AS_LIST] = ["jsonl", "tensorboard"]
    """Trackers: jsonl (always written), csv, tensorboard, wandb, mlflow, swanlab, trackio, or a class of your own as
    module:object. Several can be given. A tracker that fails or hangs does not stop training."""
    track_metrics: Annotated[
        list[str], BeforeValidator(lambda v: v.split(",") if isinstance(v, str) else v)
    ] = ["*"]
    """Patterns of the metrics that trackers get, such as reward/*. metrics.jsonl always has all. Also
    --track_metrics."""
    metrics_port: Annotated[int, Field(ge=1, le=65_535)] | None = None
    """Port at which Prometheus finds the newest metrics (http://HOST:PORT/metrics), on the node of rank 0. Needs
    prometheus-client. configs/grafana/megaverl.json is a dashboard. null: no endpoint."""
    metrics_host: Text = "127.0.0.1"
    """Address of the interface that metrics_port is opened at. Any other than the loopback needs metrics_token_env."""
    metrics_token_env: Text | None = None
    """Variable with a token that every request to metrics_port must have (Authorization: Bearer). null: no token."""
    stragglers_every: NonNegative = 0
    """Every this many steps, compare the ranks' own work, without waiting time, and name ranks that are slower than
    others at the same work. 0: never. On GPUs this times kernels and needs nvidia-resiliency-ext."""
    profile: ProfileConfig = ProfileConfig()
    """What to record in chosen steps."""

    @rule
    def check_metrics_port(self, at: str) -> Issues:
        """Refuse an endpoint that cannot be opened, that anybody may read, or that is not there."""
        names = ("metrics_host", "metrics_token_env")
        if self.metrics_port is None:
            reason = f"{at}.metrics_port is null. Name a port."
            yield from self.unused(at, reason, *names)
            return
        if importlib.util.find_spec("prometheus_client") is None:
            yield ConfigIssue(
                f"{at}.metrics_port",
                "needs prometheus-client: pip install 'megaverl[prometheus]'.",
            )
        try:
            is_public = not ip_address(self.metrics_host).is_loopback
        except ValueError:
            text = f"found {yaml_text(self.metrics_host)}; expected the address of an interface, such as 0.0.0.0."
            yield ConfigIssue(f"{at}.metrics_host", text)
            return
        token_env = self.metrics_token_env
        if token_env is not None and not os.environ.get(token_env):
            text = f"no variable {token_env} is set. Set it to a token, on the node of rank 0."
            yield ConfigIssue(f"{at}.metrics_token_env", text)
        if is_public and token_env is None:
            text = "is not the loopback, so anybody in its network could read. Name a variable with a token."
            yield ConfigIssue(
                f"{at}.metrics_host", text, involves=(f"{at}.metrics_token_env",)
            )


class ModelConfig(Section):
    """`model`: the Hugging Face folder that training starts from, or the name of a model on a hub."""

    may_be_text: ClassVar[bool] = True

    path: str = ""
    """Folder with config.json, safetensors and a tokenizer, or a model on a hub as org/name, whose weights are loaded
    while they are downloaded."""
    hub: Literal["huggingface", "modelscope"] = "huggingface"
    """Hub on which org/name is looked up. modelscope needs the package of that name."""
    revision: Text | None = None
    """Branch, tag or commit of model.path on the hub. Set a commit for a reproducible run. null: the main branch."""
    offload_folder: Text | None = None
    """Folder for downloaded files. null: the cache of the hub."""
    config: Text | None = None
    """A config.json, relative to the YAML file. `megaverl plan` reads it if model.path is not on this machine."""
    tokenizer: Text | None = None
    """Folder of a Hugging Face tokenizer, or a sentencepiece .model file. null: model.path."""
    init: Literal["weights", "random"] = "weights"
    """weights: read the safetensors. random: initialise from run.seed, for tests and the quickstart."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of weights and computation. auto: bfloat16 on a GPU, float32 on a CPU."""
    fp32_lm_head: bool = False
    """Compute logits in float32 from the 16-bit weights, in the engine and in all models that are trained or scored.
    Weights, reshards and files stay in model.dtype. Not for servers and engines of your own."""
    trust_remote_code: bool = False
    """Let transformers and vLLM run Python files of the model's folder with your permissions. Without it, such a model
    is refused unless megaverl can read it without its code, and no code is downloaded from a hub."""

    @rule
    def check_path(self, at: str) -> Issues:
        """Refuse a run without a model."""
        if not self.path:
            yield ConfigIssue(
                f"{at}.path", f"is not set. Give a Hugging Face folder: {at}.path=DIR."
            )


class SourceConfig(Section):
    """One source of prompts: a file, folder, data set or task."""

    may_be_text: ClassVar[bool] = True

    path: Text
    """A JSONL or Parquet file, a glob pattern, a folder of such files or of datasets.save_to_disk, a data set on the
    hub as org/name (needs the package datasets), a reasoning-gym task as reasoning_gym:NAME?size=1000&seed=1, a
    verifiers taskset as verifiers:NAME?size=1000, tasks of Harbor as harbor:FOLDER, rows of NeMo Gym as
    nemo_gym:FILE, an evaluation data set with its published columns as
    suite:NAME?path=FILE (aime, gpqa, code, gsm8k, math), or your own as module:object."""
    weight: PositiveFloat | None = None
    """Share of the prompts, relative to the sum of all weights. A source starts again when it is exhausted. Set it for
    all sources or for none. null: in proportion to the number of rows."""
    split: Text = "train"
    """Split of a data set on the hub or of save_to_disk."""
    subset: Text | None = None
    """Configuration name of a data set on the hub."""
    revision: Text | None = None
    """Commit, tag or branch of a data set on the hub. Set a commit to keep the data fixed. null: the newest."""
    limit: Positive | None = None
    """Use only this many rows from the start."""

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


# A single source may stand without the list, and its path without the mapping:
# `data.train=train.jsonl`.
Sources = Annotated[list[SourceConfig], BeforeValidator(_as_sources)]


class ImagesConfig(Section):
    """`data.images`: images of prompts, for models that take them.

    With engine: megatron the actor is a Qwen2-VL, Qwen2.5-VL, Qwen3-VL or Qwen3.5, without context parallelism.
    """

    key: Text = "images"
    """Column of a row's images: one image or a list. Each takes the place of <image> in the prompt, or of a part of
    type image that has no image of its own; without either, images come before the text. Paths are relative to the data
    file."""
    max_per_prompt: Positive = 8
    """Maximum number of images in a prompt."""
    max_pixels: Positive = 33_554_432
    """Maximum number of pixels of a stored image. A larger image is refused before it is decoded."""
    max_bytes: Positive = 67_108_864
    """Maximum size of a stored image in bytes."""
    allow_urls: bool | list[Text] = False
    """Fetch images from http(s) URLs. true: from any host with a public address. A list of hosts: only from these,
    whatever their addresses. Redirects follow the same rule. false: refuse URLs."""
    processor: Passthrough = {}
    """Options of the model's image processor, such as min_pixels and max_pixels, between which images are resized. They
    bound how many tokens an image becomes."""


class DataConfig(Section):
    """`data`: prompts, from files or data sets."""

    train: Sources = []
    """Sources of the training prompts."""
    validation: Sources = []
    """Sources of the held-out prompts. Without any, the run does not validate."""
    prompt_key: Text = "prompt"
    """Column of the prompt: text, or a list of chat messages. `a.b` reads a nested field."""
    answer_key: Text = "answer"
    """Column of the reference answer that rewards receive. `a.b` reads a nested field."""
    system_prompt: str | None = None
    """System message placed before every prompt."""
    chat_template: Literal["auto", "none"] = "auto"
    """auto: apply the tokenizer's chat template if it has one; text becomes a user message. none: use the text
    unchanged."""
    tools_key: Text = "tools"
    """Column of a row's tools, which are passed to the chat template."""
    tools: Text | None = None
    """JSON file with the tools of every row that has none of its own."""
    images: ImagesConfig = ImagesConfig()
    """Settings for models that take images."""
    min_prompt_tokens: NonNegative = 0
    """Drop and count prompts with fewer tokens."""
    max_prompt_tokens: Positive = 512
    """Maximum prompt length. Prompt and response must fit the model's context together: if this or
    rollout.sampling.max_tokens is not set and the context is smaller, it is chosen to fit and logged."""
    too_long: Literal["error", "drop", "truncate_left"] = "error"
    """Treatment of a longer prompt. error: end with an error that names the row. drop: leave the row out.
    truncate_left: keep the last tokens. Dropped and truncated rows are counted."""
    prompts_per_step: Annotated[int, Field(ge=1, le=10_000_000)] = 64
    """Prompts in one training step. Samples per step are this times algorithm.group_size, whatever the number of ranks.
    A resumed run cannot change it."""
    shuffle: bool = True
    """Shuffle the training prompts in every epoch, from run.seed. A resumed run cannot change it."""
    streaming: bool = False
    """Read training prompts as they are needed instead of reading all of them at the start. For data sets that are too
    large or arrive over a network. A bad row is then found only when it is read."""
    shuffle_buffer: Positive = 1024
    """With streaming: number of rows that are held in memory and shuffled among each other."""


class RewardConfig(Section):
    """One entry of `reward`; the reward is the weighted sum of all entries."""

    name: Text | None = None
    """A built-in reward, or a label for a function or model. Its metric is reward/NAME."""
    function: Text | None = None
    """Your own reward: module:function, or path/to/file.py:function."""
    path: Text | None = None
    """A reward model: Hugging Face folder of a sequence classifier with one label, as `megaverl reward` writes it. A
    response counts as correct if the model gives more than 0."""
    engine: Literal["megatron", "transformers"] = "megatron"
    """Engine of a reward model. megatron: on the grid of `reward_model`. transformers: any classifier that transformers
    supports, with its own tokenizer and chat template; every rank holds the whole model, and it cannot be trained."""
    weight: Annotated[float, Field(ge=-1e9, le=1e9)] = 1.0
    """Factor in the sum of all rewards. 0: measure the reward without training on it."""
    batched: bool = False
    """The function takes and returns lists, for example to ask a model about all responses at once."""
    accuracy: bool = False
    """This reward decides which responses are correct: those with 1 or more. If none is marked, the first reward
    decides. If that reward cannot give 1, accuracy and pass@k are not reported."""
    only_if: Text | None = None
    """Name of an earlier reward. If it gives less than 1, this reward is not computed and is 0. Saves calls of
    expensive rewards."""
    shape: Function | None = None
    """Function of your own, as module:function, from the reward's number to the number used in its place."""
    clip: list[Annotated[float, Field(ge=-1e9, le=1e9)]] | None = None
    """Minimum and maximum of the reward, such as [0, 1]. Applied after shape and before weight."""
    options: Passthrough = {}
    """Keyword arguments of the reward. An entry may also be written as {NAME: options}, with weight and other keys
    beside it: {judge: {url: ..., model: ...}, weight: 0.5}. {url: ..., model: ..., token_env: ...} alone is a reward
    model behind `megaverl serve reward`."""

    @property
    def label(self) -> str:
        """Name of the reward in metrics."""
        return self.name or (
            "reward_model" if self.path else str(self.function).rpartition(":")[2]
        )

    @rule
    def check_kind(self, at: str) -> Issues:
        """Refuse an entry that is no rule, function or model, and settings that its kind does not have."""
        if self.path is not None:
            fields = (
                "function",
                "batched",
                "accuracy",
                "options",
                "only_if",
                "shape",
                "clip",
            )
            for name in self.changed(*fields):
                yield ConfigIssue(
                    f"{at}.{name}",
                    f"is set, and so is {at}.path; a model has none. Leave it out.",
                )
        elif self.engine != "megatron":
            text = (
                "is set, and there is no path. It is of a reward model: leave it out."
            )
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
        if self.clip is None:
            return
        is_range = len(self.clip) == 2 and self.clip[0] < self.clip[1]
        if not is_range:
            text = f"found {yaml_text(self.clip)}; expected the least and the most: [0, 1]."
            yield ConfigIssue(f"{at}.clip", text)


def rewards_as_list(value: Any) -> Any:
    """Return a list of reward mappings for one reward or several, each a text or a mapping."""
    entries = value if isinstance(value, list) else [value]
    return [
        named_reward(entry) if isinstance(entry, str) else _with_name(entry)
        for entry in entries
    ]


def _with_name(entry: Any) -> Any:
    """Convert {NAME: {options}, ...} to {name: NAME, options: {...}, ...}, and {url: ...} to a served reward model."""
    if not isinstance(entry, dict) or entry.keys() & {
        "name",
        "function",
        "path",
        "options",
    }:
        return entry
    if "url" in entry:
        reward_keys = {
            key: value
            for key, value in entry.items()
            if key in RewardConfig.model_fields
        }
        return {
            **reward_keys,
            "name": "served",
            "options": {
                key: value for key, value in entry.items() if key not in reward_keys
            },
        }
    named = [
        key
        for key, value in entry.items()
        if key not in RewardConfig.model_fields and isinstance(value, dict)
    ]
    if len(named) != 1:
        return entry
    remaining = {key: value for key, value in entry.items() if key != named[0]}
    return {"name": named[0], "options": entry[named[0]], **remaining}


def named_reward(name: str) -> dict[str, str]:
    """Return the mapping for a reward that is written as text: a built-in name, or module:function."""
    return {"function": name} if ":" in name else {"name": name}


class LoopConfig(Section):
    """`trainer`: length of the training loop, validation, and what it stores."""

    steps: Positive = 100
    """Number of training steps. Each is one rollout and its updates."""
    validate_every: NonNegative = 10
    """Steps between validations. Each one generates responses to the held-out prompts. 0: never, which is the default
    without data.validation."""
    validate_at_start: bool = True
    """Also validate before the first step, to have a baseline."""
    validation_prompts: Positive | None = None
    """Number of held-out prompts to use. null: all."""
    validation_samples: Several = 1
    """Responses per held-out prompt. pass@k needs at least k."""
    validation_sampling: Passthrough = {}
    """Fields of SamplingParams that differ in validation from rollout.sampling, such as {temperature: 0}."""
    pass_at: Annotated[
        list[Positive], BeforeValidator(lambda v: [v] if isinstance(v, int) else v)
    ] = [1]
    """Values of k for which pass@k is reported. None may exceed validation_samples."""
    replan_every: NonNegative = 0
    """Every this many steps, search for a better layout with the measured lengths and times, and report its gain
    (plan/gain). 0: never."""
    program: Function | None = None
    """A training step of your own, as module:function: an async function of the run and the step number that calls the
    roles and returns the samples (docs/extend/program.md). It replaces the step of PPO and GRPO."""
    operators: list[Function] = []
    """Functions of your own, as module:function, that get the step's DataFlow and add operators to it, to observe or
    change values (megaverl flow show). Every rank then reads the whole batch."""
    best_metric: Literal["accuracy", "reward"] = "accuracy"
    """Validation metric that decides which checkpoint is the best. If no response has been correct yet, the reward
    decides."""
    save_samples: NonNegative = 4
    """Number of generated samples written to samples.jsonl at each step."""
    store_rollouts: bool = False
    """Store the responses and scores of every step in dir/name/rollouts, for replay_rollouts."""
    rollout_only: bool = False
    """Generate, score and store without training. Also `megaverl train --rollout-only`."""
    replay_rollouts: Text | None = None
    """Folder of stored rollouts to train on, without an engine. Also --replay-rollouts PATH. A replayed run takes the
    same updates, so training can be debugged without generation."""

    @rule
    def check_pass_at(self, at: str) -> Issues:
        """Refuse a pass@k of more samples than validation draws."""
        if any(k > self.validation_samples for k in self.pass_at):
            text = f"found {self.pass_at}; pass@k needs k samples, and {at}.validation_samples="
            involves = (f"{at}.validation_samples",)
            yield ConfigIssue(
                f"{at}.pass_at", f"{text}{self.validation_samples}.", involves=involves
            )

    @rule
    def check_program(self, at: str) -> Issues:
        """Refuse other changes of the step beside a step of the user's own."""
        if self.program is None:
            return
        reason = "a program is the whole step"
        conflicts = (
            (f"{at}.operators", bool(self.operators), reason),
            (f"{at}.rollout_only", self.rollout_only, reason),
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
    """Sources of prompt and answer pairs. Empty: data.train."""
    steps: Positive = 100
    """Optimizer steps."""
    batch_size: Positive = 32
    """Pairs in one step, over all ranks. A resumed run cannot change it."""
    lr: LearningRate = 1e-5
    """Peak learning rate."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "cosine"
    """How the learning rate changes after warm-up. linear and cosine fall to 0."""
    lr_warmup_steps: NonNegative = 0
    """Steps in which the learning rate rises linearly from 0."""
    max_answer_tokens: Positive | None = None
    """Maximum answer length. A longer answer is an error. null: rollout.sampling.max_tokens."""

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
    """Steps between checkpoints. A run that is killed loses the steps since the last one. 0: only after the last
    step."""
    keep_last_k: Positive = 3
    """Number of newest checkpoints to keep, in addition to the best one and milestones."""
    keep_best: bool = True
    """Also keep the checkpoint with the best validation."""
    milestone_interval: NonNegative = 0
    """Keep the checkpoints of every this many steps permanently. 0: none."""
    async_save: bool = True
    """Write checkpoints in the background. The next update waits for a copy, in host memory, of what is not written
    yet. false: needs no such copy, and the step waits for the write."""
    on_write_error: Literal["stop", "continue"] = "stop"
    """Action if a checkpoint cannot be written. stop: end the run. continue: log it and continue. Earlier
    checkpoints are kept in either case."""
    resume: Text = "auto"
    """Where to resume from. auto: the newest checkpoint of this run folder, if any. latest: the same, and it must
    exist. unfinished: the same, but a finished run starts again. never: start again. Or the path of a checkpoint or run
    folder. Also `megaverl train --resume`."""
    export_hf: bool = True
    """Write a Hugging Face folder, hf, at the end of the run."""


class PreferenceConfig(Section):
    """`preference`: pairs of a better and a worse response, for `megaverl dpo` and `megaverl reward`."""

    train: Paths = []
    """Files of rows with a prompt and two responses. With loss kto or bco, also rows with one response and its
    label."""
    validation: Paths = []
    """Files of held-out rows."""
    chosen_key: Text = "chosen"
    """Column of the better response: text, or chat messages."""
    rejected_key: Text = "rejected"
    """Column of the worse response."""
    completion_key: Text = "completion"
    """With loss kto or bco: column of the single response, in rows that are not pairs."""
    label_key: Text = "label"
    """Column of the label of a single response: true if it is desirable."""
    margin_key: Text | None = None
    """Column of how much better the chosen response is, for `megaverl reward` (arXiv 2307.09288). null: no margin."""
    loss: str = "dpo"
    """Loss of `megaverl dpo`. Pairs with a reference: dpo, ipo, hinge, robust, exo, nca, sppo, apo_zero, apo_down,
    discopop, f_dpo, wpo, aot, aot_unpaired. Pairs without a reference: simpo, orpo, cpo, alphapo. Single responses:
    kto, bco. Or module:function."""
    options: Passthrough = {}
    """Options of the loss, such as beta."""
    steps: Positive = 100
    """Optimizer steps."""
    batch_size: Positive = 32
    """Rows in one step, over all ranks. A resumed run cannot change it."""
    lr: LearningRate = 1e-6
    """Peak learning rate."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "cosine"
    """How the learning rate changes after warm-up. linear and cosine fall to 0."""
    lr_warmup_steps: NonNegative = 0
    """Steps in which the learning rate rises linearly from 0."""
    validate_every: NonNegative = 0
    """Steps between validations. 0: only at the end."""
    max_response_tokens: Positive | None = None
    """Maximum response length. A longer response is an error. null: rollout.sampling.max_tokens."""

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
    the best and the worst response. reward_model: the same pairs train the learned reward. sft: cross-entropy on the
    reference answers of the prompts."""
    every: Positive = 1
    """Run this update in every this many steps."""
    weight: PositiveFloat = 1.0
    """Factor of the loss."""
    judge: Text = "reward"
    """Metric that decides which responses are best and worst: reward (the weighted sum), accuracy, or one reward by its
    name."""

    @rule
    def check_update(self, at: str) -> Issues:
        """Refuse an entry without a kind of update, and a judge of an update that judges nothing."""
        if self.update is None:
            yield ConfigIssue(
                f"{at}.update",
                "is not set. Known: rejection, preference, reward_model, sft.",
            )
        if self.update == "sft" and self.changed("judge"):
            text = "is set, and sft learns the rows' own answers: nothing is judged. Leave it out."
            yield ConfigIssue(f"{at}.judge", text)


REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def is_hub_name(path: str) -> bool:
    """Return whether `path` looks like `org/name` and no file or folder of that name exists."""
    return REPOSITORY.fullmatch(path) is not None and not Path(path).exists()
