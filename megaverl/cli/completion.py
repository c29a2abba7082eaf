"""`megaverl completion bash|zsh|fish`: the lines that make a shell complete commands, options and keys."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

USAGE = """\
usage: megaverl completion bash|zsh|fish

Print what makes the shell complete commands, options and the configuration's keys.

  source <(megaverl completion bash)          for this shell; put it into ~/.bashrc for all
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
TAKE_KEYS = ("train", "sft", "eval", "generate", "quickstart", "plan", "flow", "keys")
OPTION = re.compile(r'"(--[a-z][a-z_-]*)"')
COMMON = ("--config", "--nproc", "--dry-run", "--no-file-checks", "--help")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["--words"]:
        print("\n".join(words(arguments[1:])))
        return 0
    if len(arguments) != 1 or arguments[0] not in SCRIPTS:
        print(USAGE, end="", file=sys.stdout if arguments in (["--help"], ["-h"]) else sys.stderr)
        return 0 if arguments in (["--help"], ["-h"]) else 2
    print(SCRIPTS[arguments[0]], end="")
    return 0


def words(typed: Sequence[str]) -> Iterator[str]:
    """What the last of the words after `megaverl` may become."""
    from megaverl.cli.main import COMMANDS

    *before, last = typed or [""]
    if not before:
        yield from (name for name in COMMANDS if name.startswith(last))
    elif last.startswith("-"):
        yield from (option for option in _options(before[0]) if option.startswith(last))
    elif before[0] == "check-plugin" and len(before) == 1:
        from megaverl.trainer.contracts.check import KINDS

        yield from (kind for kind in KINDS if kind.startswith(last))
    elif before[0] in TAKE_KEYS and "/" not in last:
        yield from _keys(last, before[0])


def _options(command: str) -> list[str]:
    """The options that a command's source names; nothing is imported for them."""
    path = Path(__file__).with_name(f"{command.replace('-', '_')}.py")
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    shared = COMMON if "command import parser" in text else ("--help",)
    return list(dict.fromkeys([*OPTION.findall(text), *shared]))


def _keys(begin: str, command: str) -> Iterator[str]:
    """Keys of the configuration; only the next part of a name, so that the list stays short."""
    from megaverl.config.schema import Config
    from megaverl.config.section import described_keys

    end = "" if command == "keys" else "="
    found = set()
    for entry in described_keys(Config):
        if entry.key.startswith(begin) and ".N." not in entry.key:
            rest = entry.key[len(begin) :]
            found.add(begin + rest.partition(".")[0] + ("." if "." in rest else end))
    yield from sorted(found)


if __name__ == "__main__":
    sys.exit(main())
