"""Convert a Megatron distributed checkpoint or a run to a Hugging Face folder; the same as `megaverl convert --to hf`.

python tools/convert_megatron_to_hf.py SOURCE OUTPUT [--verify ...]
"""

from __future__ import annotations

import sys

from megaverl.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["convert", "--to", "hf", *sys.argv[1:]]))
