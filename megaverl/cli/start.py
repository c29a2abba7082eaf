"""Commands for the first minutes with megaverl.

`init` writes a recipe for the user's model and data, `recipes` lists the recipes that
come with the package, and `draft-head` writes a new head for speculative decoding.
"""

from __future__ import annotations

import argparse
import glob
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from megaverl.cli.options import Subcommand, UsageError
from megaverl.config import Config, load_config
from megaverl.config.algorithm import PRESETS
from megaverl.config.loader import layered
from megaverl.config.section import described_keys
from megaverl.config.successors import successor_sentence
from megaverl.config.wording import did_you_mean
from megaverl.config.yaml_source import all_recipes, recipe, recipes_folder
from megaverl.errors import MegaverlError
from megaverl.gpus import count_gpus
from megaverl.sharding.draft_head import EAGLE3, HEAD_METHODS

INIT = """\
Write a configuration for your own model and data: train.yaml, with a comment for each key, and rewards.py if the reward
is your own function. On a terminal the command asks for missing options. It looks at the model, the rows and this
machine, and prints the next command. Existing files are not overwritten.

  megaverl init
  megaverl init mine --model runs/quickstart/hf --data train.jsonl --reward exact_match --algorithm grpo --nproc 2
"""
RECIPES = """\
List the included recipes, what each shows and where it runs; or print one.

  megaverl recipes                        all of them
  megaverl recipes qwen                   recipes with this text in their name
  megaverl recipes gsm8k_smollm2/dapo     print one; use it as `base:` of your own
  megaverl recipes examples/ppo_trainer/run.sh   name what replaces a file of another trainer
"""
HEAD = """\
Write an untrained head for a model: one decoder layer that proposes tokens from the model's hidden states.
Train it with `draft.train`. Existing folders are not overwritten.

  megaverl draft-head MODEL_FOLDER HEAD_FOLDER              an EAGLE-3 head
  megaverl draft-head MODEL_FOLDER HEAD_FOLDER --kind mtp   an MTP head, with the model's output layer
"""
# Column names that are tried for the prompt and the reference answer, the most likely
# ones first.
PROMPTS = ("prompt", "question", "problem", "instruction", "query", "input", "messages")
ANSWERS = (
    "answer",
    "solution",
    "ground_truth",
    "final_answer",
    "response",
    "output",
    "target",
    "label",
)
# Maps the choices of `--reward` to their meaning.
JUDGES = {
    "function": "your own function, in rewards.py",
    "exact_match": "1 if the response equals the answer",
    "math_verify": "1 if the last formula or number equals the answer in value",
    "gsm8k": "1 if the last number equals the one after #### in the answer",
}
# Content of rewards.py.
FUNCTION = '''\
"""Reward. To test it on odd responses: megaverl check-plugin reward {path}:score"""


def score(prompt, response, reference, extra):
    """Return the reward of a response, a number.

    Args:
        reference: answer of the row. extra: its other columns.
    """
    return float(response.strip() == str(reference).strip())
'''
# Limits in tokens that `init` writes when the model's context is long enough for both.
LENGTHS = {"data.max_prompt_tokens": 512, "rollout.sampling.max_tokens": 512}
# Keys that `init` adds on a machine with GPUs, where the engine shares them with
# training. A run derives the engine's share of their memory, unless one is written.
ON_GPUS = {"rollout.sleep": True}
# Comments for keys that hold lists, or whose own description is written by another
# library.
MEANINGS = {
    "data.train": "Rows with a prompt and an answer; check them with `megaverl data check`",
    "reward": "Rewards, which are summed",
    "actor.optimizer.lr": "Learning rate",
    "rollout.sampling.max_tokens": "Maximum response length in tokens",
    "rollout.vllm.gpu_memory_utilization": "Share of a GPU's memory for vLLM",
}


def _init_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        nargs="?",
        default=".",
        help="folder for the files, created if necessary (.)",
    )
    parser.add_argument(
        "--model", metavar="FOLDER", help="Hugging Face folder, or org/name on the hub"
    )
    parser.add_argument(
        "--data",
        metavar="FILE",
        help="rows of prompts: JSONL, Parquet, a folder, or org/name",
    )
    parser.add_argument(
        "--prompt-key",
        metavar="COLUMN",
        help="column of the prompt, if its name is not a usual one",
    )
    parser.add_argument(
        "--answer-key", metavar="COLUMN", help="column of the reference answer"
    )
    parser.add_argument("--reward", choices=tuple(JUDGES), help="reward of a response")
    parser.add_argument(
        "--algorithm",
        metavar="NAME",
        help="grpo, ppo, ... (megaverl keys algorithm.name)",
    )
    parser.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help="processes on this machine; default: one per GPU, else 2",
    )


def _init(arguments: argparse.Namespace) -> int:
    """Ask for what no option gives, then write train.yaml and, for the reward `function`, rewards.py."""
    folder = Path(arguments.folder)
    recipe_file = folder / "train.yaml"
    rewards_file = folder / "rewards.py"
    if recipe_file.exists():
        raise UsageError(
            f"{recipe_file} already exists and is not overwritten. Name another folder, or remove it"
        )
    question = "Model (a Hugging Face folder, or org/name on the hub)"
    model = _ask(arguments.model, "--model", question, wrong=_wrong_model)
    question = "Prompts (a JSONL or Parquet file, a folder, or org/name on the hub)"
    data = _ask(arguments.data, "--data", question, wrong=_wrong_data)
    columns, answers = _columns(data, arguments.prompt_key, arguments.answer_key)
    # GSM8K's answers end in "#### NUMBER".
    likely = "gsm8k" if "####" in answers else "function"
    question = f"Reward ({', '.join(JUDGES)})"
    judge = _ask(arguments.reward, "--reward", question, likely, wrong=_one_of(JUDGES))
    question = "Algorithm (grpo, ppo, ...)"
    algorithm = _ask(
        arguments.algorithm, "--algorithm", question, "grpo", wrong=_one_of(PRESETS)
    )
    ranks = str(count_gpus() or min(2, os.cpu_count() or 1))
    nproc_option = None if arguments.nproc is None else str(arguments.nproc)
    nproc = _ask(
        nproc_option, "--nproc", "Processes on this machine", ranks, wrong=_wrong_nproc
    )

    # Paths in the recipe are absolute, so that it can be used from every folder.
    rewards_path = os.path.abspath(rewards_file)
    model = _absolute_path(model)
    data = _absolute_path(data)
    reward = (
        {"function": f"{rewards_path}:score"}
        if judge == "function"
        else {"name": judge}
    )
    values: dict[str, Any] = {
        "run.name": folder.resolve().name or "mine",
        "run.nproc": int(nproc),
        "model.path": model,
        "data.train": [data],
        **columns,
        "data.prompts_per_step": 16,
        "reward": [reward],
        "algorithm.name": algorithm,
        "algorithm.group_size": 8,
        **_model_keys(model),
        "actor.optimizer.lr": 1e-6,
        "trainer.steps": 100,
        "checkpoint.save_interval": 20,
        "checkpoint.keep_last_k": 2,
    }
    layout, reason = _choose_layout(values, int(nproc))
    values |= layout
    text = _format_recipe(values, reason)
    folder.mkdir(parents=True, exist_ok=True)
    if judge == "function" and not rewards_file.exists():
        rewards_file.write_text(FUNCTION.format(path=rewards_file), encoding="utf-8")
        print(
            f"{rewards_file}: the reward; change it, and try it with megaverl check-plugin reward {rewards_file}:score"
        )
    recipe_file.write_text(text, encoding="utf-8")
    print(f"{recipe_file}: {algorithm} on {nproc} processes. {reason}".rstrip())
    # A recipe that cannot be loaded would be an error of this command, so it is
    # reported now.
    load_config(str(recipe_file), [], check_paths=False)
    print(f"\nnext:\n  megaverl data check --config {recipe_file}")
    print(
        f"  megaverl train --config {recipe_file} --dry-run\n  megaverl train --config {recipe_file}"
    )
    return 0


def _absolute_path(path: str) -> str:
    """Return the absolute path of a file or folder of this machine. Names on a hub and modules are returned unchanged.

    `rows.py:train` keeps the part after the colon, the name of a function in the file.
    """
    file, colon, function = path.partition(":")
    is_here = Path(file).exists() or glob.glob(file)
    return f"{os.path.abspath(file)}{colon}{function}" if is_here else path


def _ask(
    option_value: str | None,
    option: str,
    question: str,
    default: str | None = None,
    *,
    wrong: Callable[[str], str],
) -> str:
    """Return an option's value, the answer given on a terminal, or the default.

    On a terminal the question is repeated until the answer is right.

    Args:
        option_value: the option's value. None: ask.
        wrong: returns what is wrong with a value, or an empty text.

    Raises:
        UsageError: the value is wrong, or there is none and no terminal to ask on.
    """
    asks = option_value is None and sys.stdin.isatty()
    while True:
        value = option_value
        if asks:
            value = input(f"{question}{f' [{default}]' if default else ''}: ").strip()
        value = value or default
        if value and not (mistake := wrong(value)):
            return value
        if not value:
            mistake = f"not given: {question[0].lower()}{question[1:]}."
        if not asks:
            hint = "" if value else " Add the option; there is no terminal to ask on"
            raise UsageError(f"{option}: {mistake}{hint}")
        print(mistake)


def _one_of(known: Collection[str]) -> Callable[[str], str]:
    """Build a check that accepts only the known names."""
    return lambda value: (
        "" if value in known else f"there is no `{value}`.{did_you_mean(value, known)}"
    )


def _wrong_model(model: str) -> str:
    """Return what is wrong with the name of a model, or an empty text. Names on a hub are not looked up."""
    on_hub = model.count("/") == 1 and not model.startswith((".", "/"))
    if on_hub or (Path(model) / "config.json").is_file():
        return ""
    return (
        f"{model} is not here. Give a folder with config.json, or org/name on the hub"
    )


def _wrong_data(data: str) -> str:
    """Return what is wrong with a data source, or an empty text. Sources on a hub and functions are not opened."""
    from megaverl.data.sources import kind_of, open_source

    if kind_of(data) in ("own", "hub"):
        return ""
    try:
        open_source(data)[0]
    except MegaverlError as error:
        return str(error)
    return ""


def _wrong_nproc(number: str) -> str:
    """Return what is wrong with a number of processes, or an empty text."""
    return (
        ""
        if number.isdigit() and int(number)
        else f"found {number}; expected a number of processes, 1 or more"
    )


def _columns(
    data: str, prompt_key: str | None, answer_key: str | None
) -> tuple[dict[str, Any], str]:
    """Find the prompt and answer columns in the first row of the data.

    Returns:
        The keys that name the columns, without those that equal the default, and the first row's answer. The answer is
            empty for data on a hub or from a function, which is not read here.

    Raises:
        UsageError: a column that was named is missing, or no column looks like a prompt.
    """
    from megaverl.data.sources import kind_of, open_source

    if kind_of(data) in ("own", "hub"):
        return _column_keys(prompt_key or PROMPTS[0], answer_key or ANSWERS[0]), ""
    row = open_source(data)[0]
    prompt = prompt_key or next((name for name in PROMPTS if name in row), None)
    answer = answer_key or next((name for name in ANSWERS if name in row), None)
    for option, name in (("--prompt-key", prompt), ("--answer-key", answer)):
        # An answer is optional: without an option and without a likely column, there is
        # none.
        is_unclear = name is None and option == "--prompt-key"
        is_missing = name is not None and name not in row
        if is_unclear or is_missing:
            missing = (
                f"there is no column {name}"
                if name
                else "which column holds the prompt is not clear"
            )
            raise UsageError(
                f"{option}: {missing} in {data}, which has {', '.join(row)}"
            )
    return _column_keys(prompt or "", answer or ANSWERS[0]), str(
        row.get(answer or "", "")
    )


def _column_keys(prompt: str, answer: str) -> dict[str, Any]:
    """Return the keys that name the prompt and answer columns, without those that equal the default."""
    keys = {
        "data.prompt_key": (prompt, PROMPTS[0]),
        "data.answer_key": (answer, ANSWERS[0]),
    }
    return {key: name for key, (name, default) in keys.items() if name != default}


def _model_keys(model: str) -> dict[str, Any]:
    """Choose the training engine and the token limits that fit a model.

    Models that megatron-core cannot train get `actor.engine: fsdp`. The limits are left
    out if the model's context is too short for them: megaverl then chooses limits that
    fit. For a model on a hub only the limits are returned.
    """
    from megaverl.sharding.model_spec import ARCHITECTURES, ModelSpec

    if not Path(model).is_dir():
        # The model is on a hub, and its context is unknown.
        return LENGTHS
    spec = ModelSpec.outline(model)
    # megaverl chooses lengths itself where none are written.
    lengths = LENGTHS if spec.max_positions >= sum(LENGTHS.values()) else {}
    return (
        lengths
        if spec.architecture in ARCHITECTURES
        else {"actor.engine": "fsdp", **lengths}
    )


def _choose_layout(values: Mapping[str, Any], world: int) -> tuple[dict[str, Any], str]:
    """Choose the parallel layout for this machine's GPUs.

    Returns:
        Keys of the layout with the shortest predicted step among those that fit into memory, and a sentence that
            explains the choice. Without a GPU there are no keys.
    """
    if count_gpus() == 0:
        return {}, "No GPU is visible: a copy of the model on each process."
    if values.get("actor.engine") == "fsdp":
        return ON_GPUS, "The model is cut over all of them (FSDP2)."
    from megaverl.planner.candidates import shown
    from megaverl.planner.job import find_spec
    from megaverl.planner.search import LayoutSearch, hardware_of

    try:
        make = layered(None, list({**values, **ON_GPUS}.items()))
        hardware = hardware_of(make({}), world)
        best = (
            LayoutSearch(make, find_spec(make({})), world, hardware).best(1).choices[0]
        )
    except MegaverlError as error:
        reason = str(error).strip().split("\n")[0]
        return (
            ON_GPUS,
            f"Cut actor.tp and rollout.tp as the model needs (megaverl plan says what fits): {reason}",
        )
    chosen = {
        key: value for key, value in shown(best.settings).items() if value is not None
    }
    return {
        **ON_GPUS,
        **chosen,
    }, f"{best.grid}: of what fits the fastest, as predicted for {hardware.name}."


def _format_recipe(values: Mapping[str, Any], reason: str) -> str:
    """Format the keys as YAML sections, each key with the first sentence of its description as a comment.

    Args:
        reason: sentence about the layout, for the comment at the top.
    """
    meanings = {entry.key: entry.meaning for entry in described_keys(Config)} | MEANINGS
    lines = [
        "# Written by `megaverl init`. `megaverl keys SECTION` explains what else can be set; any key can also be",
        "# laid over this file on the command line: trainer.steps=5.",
    ]
    if reason:
        lines.append(f"# {reason}")
    open_sections: list[str] = []
    order = list(dict.fromkeys(key.partition(".")[0] for key in values))
    # `sorted` is stable: keys of one section are brought together, and otherwise keep
    # their order.
    for key in sorted(values, key=lambda key: order.index(key.partition(".")[0])):
        *sections, name = key.split(".")
        for depth, section in enumerate(sections):
            if open_sections[depth : depth + 1] != [section]:
                if depth == 0:
                    lines.append("")
                lines.append(f"{'  ' * depth}{section}:")
                open_sections = sections[: depth + 1]
        open_sections = sections
        value = (
            yaml.safe_dump(values[key], default_flow_style=True, width=200)
            .removesuffix("...\n")
            .strip()
        )
        meaning = re.split(r"(?<=[.:;])\s", meanings.get(key, ""))[0].rstrip(".:;")
        if not sections:
            lines.append("")
        comment = f"  # {meaning}" if meaning else ""
        lines.append(f"{'  ' * len(sections)}{name}: {value}{comment}")
    return "\n".join(lines) + "\n"


def _recipes_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name",
        nargs="?",
        default="",
        help="name of one, such as gsm8k_smollm2/dapo, or part of a name",
    )


def _recipes(arguments: argparse.Namespace) -> int:
    """Print the list of recipes, or one recipe."""
    names = [_name(path) for path in all_recipes()]
    if arguments.name in names:
        path = recipe(arguments.name)
        print(f"# {path}\n{path.read_text(encoding='utf-8')}", end="")
        return 0
    chosen = [name for name in names if arguments.name in name]
    if not chosen and (sentence := successor_sentence(arguments.name)):
        print(f"{arguments.name}: {sentence[0].lower()}{sentence[1:]}")
        return 0
    if not chosen:
        raise UsageError(
            f"no recipe has `{arguments.name}` in its name.{did_you_mean(arguments.name, names)}"
        )
    print(
        f"in {recipes_folder()}; `megaverl recipes NAME` shows one, with the command that runs it"
    )
    print("\n".join(_recipe_lines(chosen)))
    return 0


def _name(path: Path) -> str:
    """Return a recipe's name: its path below the folder of recipes, without the suffix."""
    return str(path.relative_to(recipes_folder()).with_suffix(""))


def _recipe_lines(names: Sequence[str]) -> Iterator[str]:
    """Yield a paragraph for each recipe, after a heading for each folder with what its recipes have in common.

    The heading's text is the first comment of the folder's base.yaml.
    """
    width = max(len(name.rpartition("/")[2]) for name in names) + 4
    columns = max(60, shutil.get_terminal_size((120, 24)).columns)
    folder: str | None = None
    for name in sorted(names, key=lambda name: (name.rpartition("/")[0], name)):
        above, _, last = name.rpartition("/")
        if above != folder:
            folder = above
            base = recipes_folder() / above / "base.yaml"
            shared = _heading(base).partition(": ")[2] if base.is_file() else ""
            heading = f"{above}: {shared}" if shared else above
            yield "\n" + textwrap.fill(heading, columns) if above else ""
        yield textwrap.fill(
            f"  {last:<{width}}"[:width] + _heading(recipe(name)),
            columns,
            subsequent_indent=" " * width,
        )


def _heading(path: Path) -> str:
    """Return the first paragraph of a recipe's leading comment, on one line.

    A last sentence that ends in a colon is left out: it introduces the command that
    follows.
    """
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("# "):
            break
        lines.append(line.removeprefix("# "))
    return re.sub(r"(?<=\.) [^.]*:$", "", " ".join(lines))


def _head_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="Hugging Face folder of the model")
    parser.add_argument("folder", help="new folder for the head")
    parser.add_argument(
        "--kind",
        choices=HEAD_METHODS,
        default=EAGLE3,
        help="vLLM's speculative method (eagle3)",
    )
    parser.add_argument(
        "--intermediate-size",
        type=int,
        metavar="N",
        help="width of an EAGLE-3 head's MLP (that of the model's)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the weights (0)")


def _head(arguments: argparse.Namespace) -> int:
    # Imported here because it imports transformers.
    from megaverl.models.new_heads import make_draft_head

    make_draft_head(
        arguments.folder,
        arguments.model,
        method=arguments.kind,
        seed=arguments.seed,
        intermediate_size=arguments.intermediate_size,
    )
    drafts = f"{{method: {arguments.kind}, model: {arguments.folder}, num_speculative_tokens: 3}}"
    print(f"head written to {arguments.folder}; train it with a policy of this model:")
    print(
        f"  megaverl train ... 'rollout.vllm.speculative_config={drafts}' "
        "'draft={train: true, engine: fsdp}'"
    )
    return 0


COMMANDS = {
    "draft-head": Subcommand(HEAD, _head_options, _head),
    "init": Subcommand(INIT, _init_options, _init),
    "recipes": Subcommand(RECIPES, _recipes_options, _recipes),
}
