"""Commands that look at parts of the user's own before a run does: `check-plugin` and `data check`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence

import yaml

from megaverl.cli.options import Subcommand, UsageError, add_json
from megaverl.config.loader import load_any
from megaverl.config.run import DataConfig, SourceConfig
from megaverl.errors import FAILED, ConfigError
from megaverl.trainer.contracts import KINDS, check

PLUGIN = """\
Run the contract tests of a plug-in: what every reward, loss, environment, ... must keep to, tried on your own.

  megaverl check-plugin reward my_rewards.py:score
  megaverl check-plugin reward my_rewards.py:score_many batched=true
  megaverl check-plugin loss my_package.losses:soft_clip clip=0.3
  megaverl check-plugin data my_data.py:rows prompt_key=question

Kinds, and the keys that name them in a configuration:
{kinds}

Exit code: 0 where all holds, 1 where something does not, 2 for a mistake in the command.
"""
DATA = """\
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


def _plugin_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=tuple(KINDS), metavar="KIND")
    parser.add_argument("name", metavar="module:object", help="or path/to/file.py:object")
    parser.add_argument("options", nargs="*", metavar="key=value", help="options that it is called with")


def _plugin(arguments: argparse.Namespace) -> int:
    broken = 0
    for kept in check(arguments.kind, arguments.name, _key_values(arguments.options)):
        broken += bool(kept.problem)
        print(f"{'FAIL' if kept.problem else 'ok  '}  {kept.promise}")
        if kept.problem:
            print(f"      {kept.problem}")
    print(f"{arguments.name}: {'all holds' if not broken else f'{broken} broken'}")
    return FAILED if broken else 0


def _key_values(given: Sequence[str]) -> Mapping[str, object]:
    """`key=value`, values as YAML.

    Raises:
        ConfigError: one without an equals sign.
    """
    found = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"{text}: expected key=value.")
        found[key] = yaml.safe_load(value)
    return found


def _data_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("check",))
    parser.add_argument(
        "sources", nargs="*", help="files, patterns, folders, names on the hub; with --config key=value"
    )
    parser.add_argument("--config", metavar="FILE", help="of a run: its data, and how it reads them")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="count in tokens; a model folder, or a .model file")
    parser.add_argument("--prompt-key", default="prompt", metavar="COLUMN")
    parser.add_argument("--answer-key", default="answer", metavar="COLUMN", help="'' if there is none")
    parser.add_argument("--max-prompt-tokens", type=int, metavar="N", help="longer ones are counted as too long")
    parser.add_argument("--split", default="train", help="of a data set on the hub")
    parser.add_argument("--subset", help="configuration of a data set on the hub")
    parser.add_argument("--all", action="store_true", help=f"show every problem, not the first {SHOWN}")
    add_json(parser)


def _data(arguments: argparse.Namespace) -> int:
    from megaverl.data.examine import encoder_of, examine, examine_run
    from megaverl.data.prompts import Columns
    from megaverl.data.sources import open_source

    if arguments.config is not None:
        found = examine_run(load_any(arguments.config, arguments.sources), arguments.tokenizer)
    elif arguments.sources:
        data = DataConfig(max_prompt_tokens=arguments.max_prompt_tokens or 2**31, too_long="drop")
        encoder, images = encoder_of(data, arguments.tokenizer) if arguments.tokenizer else (None, None)
        columns = Columns(arguments.prompt_key, arguments.answer_key or None, images=images)
        places = [SourceConfig(path=path, split=arguments.split, subset=arguments.subset) for path in arguments.sources]
        found = {place.path: examine(open_source(place), encoder, columns) for place in places}
    else:
        raise UsageError("give sources, or --config FILE")
    if arguments.json:
        print(json.dumps({name: examined.as_dict() for name, examined in found.items()}, indent=2, ensure_ascii=False))
    else:
        most = None if arguments.all else SHOWN
        print("\n\n".join(examined.as_text(name, most) for name, examined in found.items()))
    return FAILED if any(examined.errors for examined in found.values()) else 0


_WIDTH = max(map(len, KINDS))
_KINDS = "\n".join(f"  {name:<{_WIDTH}}  {kind.key}: {kind.what}" for name, kind in KINDS.items())
COMMANDS = {
    "check-plugin": Subcommand(PLUGIN.format(kinds=_KINDS), _plugin_options, _plugin),
    "data": Subcommand(DATA, _data_options, _data),
}
