"""Hugging Face folder -> Megatron distributed checkpoint: `megaverl convert --to megatron` under a name of its own.

python tools/convert_hf_to_megatron.py SOURCE OUTPUT [--verify ...]
"""

from __future__ import annotations

import sys

from megaverl.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["convert", "--to", "megatron", *sys.argv[1:]]))
