#!/usr/bin/env bash
# The test suite: ruff, mypy, pytest. Sets up .venv on the first run.
#
#   ./launch/test.sh [pytest arguments]         e.g. ./launch/test.sh tests/sharding -k qwen3
#
# Without arguments: the whole suite, its files shared by two workers.
# shellcheck source=launch/bootstrap.sh
source "$(dirname "${BASH_SOURCE[0]}")/bootstrap.sh"
cd "$MEGAVERL_ROOT" || exit
# reasoning-gym has a part that is compiled; without it its tests are skipped.
if [[ -z "${MEGAVERL_PYTHON:-}" && "$_base_lock" == "$_cpu_lock" ]] && command -v cc >/dev/null &&
    "$PYTHON" -c 'import os, sysconfig as s; raise SystemExit(not os.path.exists(s.get_path("include") + "/Python.h"))'; then
    _bootstrap reasoning-gym
fi

# One thread per process: the tests run several processes on few cores. No test may reach for a hub.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
export HF_HUB_OFFLINE=1 MPLBACKEND=Agg
# An environment for a CPU is tested on the CPU, whatever else is here.
[[ -n "${MEGAVERL_PYTHON:-}" || "$_base_lock" != "$_cpu_lock" ]] || export CUDA_VISIBLE_DEVICES=""

"$PYTHON" -m ruff check .
"$PYTHON" -m mypy
(($#)) || set -- --numprocesses 2 --dist loadfile --no-loadscope-reorder
exec "$PYTHON" -m pytest "$@"
