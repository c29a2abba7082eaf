"""Convert a Hugging Face folder to a Megatron distributed checkpoint; the same as `megaverl convert --to megatron`.

python tools/convert_hf_to_megatron.py SOURCE OUTPUT [--verify ...]
"""

from __future__ import annotations

import sys

from megaverl.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["convert", "--to", "megatron", *sys.argv[1:]]))
