"""`megaverl quickstart`: tokenizer, model and data made on the spot, then warm-up and PPO in one job."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from megaverl.cli.command import parser, run
from megaverl.config import load_config
from megaverl.config.yaml_source import recipe
from megaverl.errors import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    described = parser("quickstart", "Teach a tiny model from nothing: warm-up, then PPO. Downloads nothing.")
    arguments = described.parse_intermixed_args(given)
    arguments.config = arguments.config or str(recipe("quickstart"))
    if arguments.dry_run:
        arguments.no_file_checks = True  # the files are made by the run
    elif "RANK" not in os.environ:  # the process that starts the ranks makes what they read
        try:
            config = load_config(arguments.config, arguments.overrides, command="quickstart", check_paths=False)
        except ConfigError as error:
            print(error, file=sys.stderr)
            return 2
        from megaverl.trainer.quickstart import prepare

        prepare(config)
    return run("quickstart", arguments, given, {})


if __name__ == "__main__":
    sys.exit(main())
