"""Convert a Megatron distributed checkpoint to another grid; the same as `megaverl convert --to megatron`.

python tools/convert_megatron_to_megatron.py SOURCE OUTPUT [--verify ...]
"""

from __future__ import annotations

import sys

from megaverl.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["convert", "--to", "megatron", *sys.argv[1:]]))
