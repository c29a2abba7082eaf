#!/usr/bin/env bash
# Training on this machine: one process per GPU, or as many as the grids need where there is none.
#
#   ./launch/train_one_node.sh --config configs/gsm8k_smollm2/grpo_pp2.yaml model.path=DIR key=value ...
#
# MEGAVERL_PYTHON   interpreter to use (default: .venv/bin/python if it is there, else python)
# COMMAND           train (default), sft, eval or generate
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${MEGAVERL_PYTHON:-$([[ -x "$root/.venv/bin/python" ]] && echo "$root/.venv/bin/python" || echo python)}"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

exec "$python" -m megaverl.cli.main "${COMMAND:-train}" "$@"
