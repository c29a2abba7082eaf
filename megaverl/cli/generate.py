"""`megaverl generate`: responses to prompts, from a file or the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megaverl.cli.command import parser, run
from megaverl.config.checks import DATA_SUFFIXES


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    described = parser("generate", "Generate responses; rollout.sampling has the settings.")
    described.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt; may stand several times")
    described.add_argument("--prompts", metavar="FILE", help="JSONL or Parquet; data.prompt_key names the column")
    described.add_argument("--output", metavar="FILE", help="JSONL file to write; without it, text on the terminal")
    arguments = described.parse_intermixed_args(given)
    _check(described, arguments)
    options = {name: getattr(arguments, name) for name in ("prompt", "prompts", "output")}
    return run("generate", arguments, given, options)


def _check(described: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    if arguments.prompt is None and arguments.prompts is None:
        described.error("give --prompt TEXT or --prompts FILE")
    if arguments.prompts is not None:
        path = Path(arguments.prompts)
        if path.suffix not in DATA_SUFFIXES:
            described.error(f"--prompts: found {path}; expected a file that ends in {' or '.join(DATA_SUFFIXES)}")
        if not path.is_file():
            described.error(f"--prompts: {path} does not exist")


if __name__ == "__main__":
    sys.exit(main())
