"""`megaverl keys [PREFIX]`: the configuration's keys: type, default, meaning; other libraries' included."""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator, Sequence

from megaverl.config import Config
from megaverl.config.errors import did_you_mean
from megaverl.config.passthrough import PLACES
from megaverl.config.section import described_keys

EXAMPLES = """\
  megaverl keys                        all of this project's keys
  megaverl keys algorithm.kl           one section
  megaverl keys rollout.sampling       those of vLLM's SamplingParams, as installed"""


def main(argv: Sequence[str] | None = None) -> int:
    described = argparse.ArgumentParser(
        prog="megaverl keys",
        description=f"{__doc__}\n\n{EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    described.add_argument("prefix", nargs="?", default="", help="such as actor, algorithm.kl or rollout.vllm")
    prefix = described.parse_args(argv).prefix.strip(".")
    lines = list(_lines(prefix))
    if not lines:
        known = [key for key, *_ in described_keys(Config)]
        print(f"megaverl keys: no key begins with `{prefix}`.{did_you_mean(prefix, known)}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0


def _lines(prefix: str) -> Iterator[str]:
    for key, kind, default, description in described_keys(Config):
        if _below(key, prefix):
            yield f"{key}: {kind} = {default}\n    {description}"
    for place, target in PLACES.items():
        if prefix and _below(prefix, place):
            for name, field in target.settable().items():
                if _below(f"{place}.{name}", prefix):
                    summary = field.description.partition("\n")[0]
                    default = ast.unparse(field.default) if field.default is not None else "-"
                    yield f"{place}.{name}: {field.type_text} = {default}\n    {summary}".rstrip()


def _below(key: str, prefix: str) -> bool:
    return not prefix or key == prefix or key.startswith(prefix + ".")


if __name__ == "__main__":
    sys.exit(main())
