"""Commands that use a model and train nothing: `generate` and `eval`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megaverl.cli.options import UsageError
from megaverl.cli.ranks import rank_command
from megaverl.config.checks import DATA_SUFFIXES


def _generate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt; may stand several times")
    parser.add_argument("--prompts", metavar="FILE", help="JSONL or Parquet; data.prompt_key names the column")
    parser.add_argument("--output", metavar="FILE", help="JSONL file to write; without it, text on the terminal")


def _generate(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.prompt is None and arguments.prompts is None:
        raise UsageError("give --prompt TEXT or --prompts FILE")
    if arguments.prompts is not None:
        path = Path(arguments.prompts)
        if path.suffix not in DATA_SUFFIXES:
            raise UsageError(f"--prompts: found {path}; expected a file that ends in {' or '.join(DATA_SUFFIXES)}")
        if not path.is_file():
            raise UsageError(f"--prompts: {path} does not exist")
    return {name: getattr(arguments, name) for name in ("prompt", "prompts", "output")}


COMMANDS = {
    "generate": rank_command(
        "generate",
        "Generate responses; rollout.sampling has the settings.",
        """\
  megaverl generate model.path=DIR --prompt "What is 2+3?" rollout.sampling.temperature=0
  megaverl generate --config FILE --prompts questions.jsonl --output answers.jsonl""",
        _generate_options,
        _generate,
    ),
    "eval": rank_command(
        "eval",
        "Score a model on data.validation: mean reward, accuracy, pass@k.",
        """\
  megaverl eval --config FILE model.path=runs/mine/hf trainer.validation_samples=4 'trainer.pass_at=[1, 4]'""",
    ),
}
