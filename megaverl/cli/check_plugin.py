"""`megaverl check-plugin KIND module:object`: whether a part of one's own keeps what a run expects of it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from megaverl.errors import ConfigError
from megaverl.trainer.contracts.check import KINDS, check

DESCRIPTION = """\
Run the contract tests of a plug-in: what every reward, loss, environment, ... must keep to, tried on your own.

  megaverl check-plugin reward my_rewards.py:score
  megaverl check-plugin reward my_rewards.py:score_many batched=true
  megaverl check-plugin loss my_package.losses:soft_clip clip=0.3
  megaverl check-plugin data my_data.py:rows prompt_key=question

Kinds, and the keys that name them in a configuration:
{kinds}

Exit code: 0 where all holds, 1 where something does not, 2 for a mistake in the command.
"""


def main(argv: Sequence[str] | None = None) -> int:
    width = max(map(len, KINDS))
    kinds = "\n".join(f"  {name:<{width}}  {kind.key}: {kind.what}" for name, kind in KINDS.items())
    described = argparse.ArgumentParser(
        prog="megaverl check-plugin",
        description=DESCRIPTION.format(kinds=kinds),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    described.add_argument("kind", choices=tuple(KINDS), metavar="KIND")
    described.add_argument("name", metavar="module:object", help="or path/to/file.py:object")
    described.add_argument("options", nargs="*", metavar="key=value", help="options that it is called with")
    arguments = described.parse_args(argv)
    broken = 0
    try:
        for kept in check(arguments.kind, arguments.name, _options(arguments.options)):
            broken += bool(kept.problem)
            print(f"{'FAIL' if kept.problem else 'ok  '}  {kept.promise}")
            if kept.problem:
                print(f"      {kept.problem}")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{arguments.name}: {'all holds' if not broken else f'{broken} broken'}")
    return 1 if broken else 0


def _options(given: Sequence[str]) -> dict[str, Any]:
    """`key=value`, values as YAML.

    Raises:
        ConfigError: one without an equals sign.
    """
    import yaml

    found = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"{text}: expected key=value.")
        found[key] = yaml.safe_load(value)
    return found


if __name__ == "__main__":
    sys.exit(main())
