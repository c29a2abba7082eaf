"""`megaverl data check`: read a data set, and say what is wrong with which rows."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megaverl.config import Config, load_config
from megaverl.config.loader import Command
from megaverl.config.run import DataConfig, SourceConfig
from megaverl.errors import ConfigError, MegaverlError

if TYPE_CHECKING:
    from megaverl.data.examine import Examined
    from megaverl.data.prompts import PromptEncoder

DESCRIPTION = """\
Read every row of a data set, and say what is wrong with which rows: missing columns, wrong types, lengths, prompts that
stand twice, held-out prompts that stand among the training ones. With a tokenizer prompts are rendered and counted in
tokens, as a run would. Rows without an answer may have a chosen and a rejected response, or a completion and its label.

  megaverl data check train.jsonl
  megaverl data check 'data/*.parquet' --prompt-key question --answer-key solution --tokenizer models/small
  megaverl data check --config run.yaml                    the data and preference files of a run, its own settings
  megaverl data check org/name --json > found.json         a data set on the hub

Exit code: 0 where every row can be used, 1 where some cannot, 2 for a mistake in the command.
"""
SHOWN = 20


def main(argv: Sequence[str] | None = None) -> int:
    described = _parser()
    arguments = described.parse_intermixed_args(list(sys.argv[1:] if argv is None else argv))
    if arguments.config is None and not arguments.sources:
        described.error("give sources, or --config FILE")
    try:
        found = _of_a_run(arguments) if arguments.config else _of_sources(arguments)
    except MegaverlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    if arguments.json:
        print(json.dumps({name: examined.as_dict() for name, examined in found.items()}, indent=2, ensure_ascii=False))
    else:
        print("\n\n".join(as_text(name, examined, arguments.all) for name, examined in found.items()))
    return 1 if any(examined.errors for examined in found.values()) else 0


def _parser() -> argparse.ArgumentParser:
    described = argparse.ArgumentParser(
        prog="megaverl data", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    described.add_argument("action", choices=("check",))
    described.add_argument(
        "sources", nargs="*", help="files, patterns, folders, names on the hub; with --config key=value"
    )
    described.add_argument("--config", metavar="FILE", help="of a run: its data, and how it reads them")
    described.add_argument("--tokenizer", metavar="FOLDER", help="count in tokens; a model folder, or a .model file")
    described.add_argument("--prompt-key", default="prompt", metavar="COLUMN")
    described.add_argument("--answer-key", default="answer", metavar="COLUMN", help="'' if there is none")
    described.add_argument("--max-prompt-tokens", type=int, metavar="N", help="longer ones are counted as too long")
    described.add_argument("--split", default="train", help="of a data set on the hub")
    described.add_argument("--subset", help="configuration of a data set on the hub")
    described.add_argument("--all", action="store_true", help=f"show every problem, not the first {SHOWN}")
    described.add_argument("--json", action="store_true")
    return described


def _of_sources(arguments: argparse.Namespace) -> dict[str, Examined]:
    from megaverl.data.examine import examine
    from megaverl.data.prompts import Columns
    from megaverl.data.sources import open_source

    encoder = None
    if arguments.tokenizer:
        data = DataConfig(max_prompt_tokens=arguments.max_prompt_tokens or 2**31, too_long="drop")
        encoder = _encoder(arguments.tokenizer, data, trust_remote_code=False)
    columns = Columns(arguments.prompt_key, arguments.answer_key or None)
    return {
        path: examine(
            open_source(SourceConfig(path=path, split=arguments.split, subset=arguments.subset)), encoder, columns
        )
        for path in arguments.sources
    }


def _of_a_run(arguments: argparse.Namespace) -> dict[str, Examined]:
    """The training and the held-out data of a configuration."""
    from megaverl.data.examine import examine, overlap
    from megaverl.data.preferences import PreferenceColumns
    from megaverl.data.prompts import Columns, load_tools
    from megaverl.data.sources import RowChain, as_source, open_source

    config = _load(arguments)
    data, model = config.data, config.model
    too_long = "drop" if data.too_long == "error" else data.too_long
    encoder = _encoder(
        arguments.tokenizer or model.tokenizer or model.path,
        data.model_copy(update={"too_long": too_long}),
        trust_remote_code=model.trust_remote_code,
    )
    tools = load_tools(data.tools) if data.tools else None
    columns = Columns(data.prompt_key, data.answer_key, data.tools_key, tools)
    preference, found = config.preference, {}
    judged = PreferenceColumns(
        preference.chosen_key,
        preference.rejected_key,
        preference.completion_key,
        preference.label_key,
        preference.margin_key,
    )
    for section in ("data", "preference"):
        both: list[Examined] = []
        for part in ("train", "validation"):
            sources = [as_source(each) for each in getattr(getattr(config, section), part)]
            if sources:
                rows = RowChain([open_source(source) for source in sources])
                both.append(examine(rows, encoder, columns, judged if section == "preference" else None))
                found[f"{section}.{part}"] = both[-1]
        if len(both) == 2:
            both[1].problems += overlap(*both)
    return found


def _load(arguments: argparse.Namespace) -> Config:
    """The configuration, of whichever command it is one."""
    commands: tuple[Command, ...] = ("train", "sft", "dpo", "reward")
    refusals: list[ConfigError] = []
    for command in commands:
        try:
            return load_config(arguments.config, arguments.sources, command=command, check_paths=False)
        except ConfigError as error:
            refusals.append(error)
    raise refusals[0]


def _encoder(tokenizer: str, data: DataConfig, *, trust_remote_code: bool) -> PromptEncoder:
    from megaverl.data.prompts import PromptEncoder, PromptFormat
    from megaverl.data.tokenizers import load_tokenizer

    shape = PromptFormat(
        chat_template=data.chat_template,
        system_prompt=data.system_prompt,
        min_tokens=data.min_prompt_tokens,
        max_tokens=data.max_prompt_tokens,
        too_long=data.too_long,
    )
    return PromptEncoder(load_tokenizer(tokenizer, trust_remote_code=trust_remote_code), shape)


def as_text(name: str, found: Examined, all_problems: bool = False) -> str:
    """What a person reads of one data set."""
    from megaverl.data.examine import quantiles

    lines = [f"{name}: {found.num_rows} rows, {found.num_usable} can be used"]
    if found.num_long or found.num_short:
        lines.append(f"  too long: {found.num_long}   too short: {found.num_short}")
    if found.num_pairs:
        lines.append(f"  pairs of responses: {found.num_pairs}")
    if found.num_desirable + found.num_undesirable:
        lines.append(f"  single responses: {found.num_desirable} desirable, {found.num_undesirable} undesirable")
    for what, values in (("prompt tokens", found.lengths), ("answer characters", found.answer_lengths)):
        if values:
            numbers = "   ".join(f"{word} {value}" for word, value in quantiles(values).items())
            lines.append(f"  {what}: {numbers}")
    lines.append(f"  columns: {', '.join(f'{key} ({count})' for key, count in found.keys.items())}")
    if found.example:
        example = found.example if len(found.example) <= 400 else found.example[:400] + " ..."
        lines += ["  the first prompt, as the model sees it:", *(f"    | {line}" for line in example.splitlines())]
    shown = found.problems if all_problems else found.problems[:SHOWN]
    lines += [f"  {problem}" for problem in shown]
    if len(shown) < len(found.problems):
        lines.append(f"  ... and {len(found.problems) - len(shown)} more (--all)")
    if not found.problems:
        lines.append("  nothing is wrong with it")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
