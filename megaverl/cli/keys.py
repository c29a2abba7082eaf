"""Commands that list what megaverl accepts.

`keys` lists the configuration's keys, `completion` prints a script with which a shell
completes them, and `models` lists the models that can be trained.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from megaverl.cli.options import Subcommand, UsageError
from megaverl.config import Config
from megaverl.config.passthrough import PLACES
from megaverl.config.section import described_keys
from megaverl.config.wording import did_you_mean
from megaverl.errors import MISTAKE

if TYPE_CHECKING:
    from megaverl.models.support import Support

KEYS = """\
Explain configuration keys: type, default and meaning, including fields of other libraries.

  megaverl keys                        all keys of megaverl
  megaverl keys algorithm.kl           one section
  megaverl keys rollout.sampling       fields of the installed vLLM's SamplingParams"""
MODELS = """\
List which models train on which engine, which generate and which can be converted.

  megaverl models                      all known models, and what applies to others
  megaverl models FOLDER               test one model: build it from its config.json, without weights"""
COMPLETION = """\
Print a script that completes commands, options and configuration keys in the shell.

  source <(megaverl completion bash)          for this shell; add it to ~/.bashrc for all
  source <(megaverl completion zsh)           the same for zsh
  megaverl completion fish > ~/.config/fish/completions/megaverl.fish
"""
SCRIPTS = {
    "bash": """\
_megaverl() {
    local IFS=$'\\n'
    COMPREPLY=($(megaverl completion --words "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
    [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *= ]] && compopt -o nospace
    return 0
}
COMP_WORDBREAKS=${COMP_WORDBREAKS//=/}
complete -o default -F _megaverl megaverl
""",
    "zsh": """\
_megaverl() {
    local -a found
    found=("${(@f)$(megaverl completion --words "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    if [[ -n ${found[1]} ]]; then compadd -S '' -- "${found[@]}"; else _files; fi
}
compdef _megaverl megaverl
""",
    "fish": """\
complete -c megaverl -a '(megaverl completion --words (commandline -opc)[2..-1] (commandline -ct))'
""",
}
# Commands whose arguments are completed as configuration keys.
TAKE_KEYS = ("train", "sft", "eval", "generate", "quickstart", "plan", "flow", "keys")


def _keys_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prefix",
        nargs="?",
        default="",
        help="section or key, such as actor, algorithm.kl or rollout.vllm",
    )


def _keys(arguments: argparse.Namespace) -> int:
    """Print the keys that begin with a prefix."""
    prefix = arguments.prefix.strip(".")
    lines = list(_lines(prefix))
    if not lines:
        known = [key for key, *_ in described_keys(Config)]
        print(
            f"megaverl keys: no key begins with `{prefix}`.{did_you_mean(prefix, known)}",
            file=sys.stderr,
        )
        return MISTAKE
    print("\n".join(lines))
    return 0


def _lines(prefix: str) -> Iterator[str]:
    """Yield one text per key below the prefix: key, type, default and meaning.

    Keys that are passed to another library are listed only if the prefix asks for them:
    there are hundreds.
    """
    for key, kind, default, description in described_keys(Config):
        if _below(key, prefix):
            yield f"{key}: {kind} = {default}\n    {description}"
    for place, target in PLACES.items():
        if prefix and _below(prefix, place):
            for name, field in target.settable().items():
                if _below(f"{place}.{name}", prefix):
                    summary = _summary(field.description)
                    default = (
                        ast.unparse(field.default) if field.default is not None else "-"
                    )
                    yield f"{place}.{name}: {field.type_text} = {default}\n    {summary}".rstrip()


def _summary(description: str) -> str:
    """Return the first paragraph of another library's description, on one line.

    A paragraph that ends in a colon introduces the next one, which is then included.
    """
    text = ""
    for paragraph in description.strip().split("\n\n"):
        text = f"{text} {' '.join(paragraph.split())}".strip()
        if not text.endswith(":"):
            break
    return text


def _below(key: str, prefix: str) -> bool:
    """Return whether the key is the prefix itself, or lies below it."""
    return not prefix or key == prefix or key.startswith(prefix + ".")


def _models_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", nargs="?", help="a Hugging Face folder with config.json"
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run Python files that come with the model",
    )


def _models(arguments: argparse.Namespace) -> int:
    """Print which models are supported: all of them, or the one in a folder."""
    from megaverl.models.support import (
        ANY,
        NAMED,
        WITH_TABLE,
        support_by_table,
        support_of,
    )

    if arguments.folder is not None:
        supports = support_of(
            arguments.folder, trust_remote_code=arguments.trust_remote_code
        )
        print("\n".join(map(_support, supports)))
        return 0
    width = max(map(len, WITH_TABLE))
    heads = [support.feature for support in NAMED]
    print(f"{'':{width}}  " + "".join(f"{head:<10}" for head in heads).rstrip())
    for architecture in WITH_TABLE:
        supports = support_by_table(architecture)
        cells = "".join(f"{'yes' if each.works else '-':<10}" for each in supports)
        print(f"{architecture:{width}}  {cells}".rstrip())
    print("\nany other")
    print("\n".join(_support(support) for support in ANY))
    return 0


def _support(support: Support) -> str:
    """Format one kind of support, such as training or export, as a line: name, yes or no, reason."""
    return (
        f"{support.feature:<9} {'yes' if support.works else 'no':<4} {support.reason}"
    )


def _completion_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", nargs="?", choices=tuple(SCRIPTS))
    parser.add_argument("--words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def _completion(arguments: argparse.Namespace) -> int:
    """Print a shell's completion script, or the completions that this script asks for (`--words`)."""
    if arguments.words is not None:
        # `argparse` drops a `--` that was typed, so the arguments before parsing are
        # used.
        print("\n".join(words(arguments.argv[1:])))
    elif arguments.shell is None:
        raise UsageError(f"name a shell: {', '.join(SCRIPTS)}")
    else:
        print(SCRIPTS[arguments.shell], end="")
    return 0


def words(typed: Sequence[str]) -> Iterator[str]:
    """Yield the possible completions of the last word.

    Args:
        typed: words after `megaverl`. The last one is incomplete, and may be empty.
    """
    from megaverl.cli.main import COMMANDS, parser_of

    *before, last = typed or [""]
    if not before:
        yield from (name for name in COMMANDS if name.startswith(last))
    elif before[0] not in COMMANDS:
        return
    elif last.startswith("-"):
        # The options are taken from the printed help, since argparse has no public list
        # of them.
        lines = [
            line
            for line in parser_of(before[0]).format_help().splitlines()
            if line.startswith("  -")
        ]
        options = dict.fromkeys(
            re.findall(r"(?<![\w-])--[a-z][a-z_-]*", "\n".join(lines))
        )
        yield from (option for option in options if option.startswith(last))
    elif before[0] == "check-plugin" and len(before) == 1:
        from megaverl.trainer.contracts import KINDS

        yield from (kind for kind in KINDS if kind.startswith(last))
    elif before[0] in TAKE_KEYS and "/" not in last:
        yield from _next_parts(last, "" if before[0] == "keys" else "=")


def _next_parts(begin: str, end: str) -> Iterator[str]:
    """Yield keys of the configuration that begin with `begin`, up to their next dot.

    Stopping at the dot keeps the list short.

    Args:
        end: added to a complete key.
    """
    completions = set()
    for entry in described_keys(Config):
        # `.N.` stands for an index into a list of sections. It cannot be typed as it
        # is, so it is not offered.
        if entry.key.startswith(begin) and ".N." not in entry.key:
            rest = entry.key[len(begin) :]
            completions.add(
                begin + rest.partition(".")[0] + ("." if "." in rest else end)
            )
    yield from sorted(completions)


COMMANDS = {
    "keys": Subcommand(KEYS, _keys_options, _keys),
    "models": Subcommand(MODELS, _models_options, _models),
    "completion": Subcommand(COMPLETION, _completion_options, _completion),
}
