#!/usr/bin/env bash
# The test suite: ruff, mypy, pytest. Sets up .venv on the first run.
#
#   ./launch/test.sh [pytest arguments]         e.g. ./launch/test.sh tests/sharding -k qwen3
#
# Without arguments: the whole suite, its files shared by two workers. A part of it runs with the megatron-core of the
# GPUs' lock, which is newer, under Python 3.12 where one is found; MEGAVERL_TEST_NEWER=/path/to/python names another
# environment that has it.
# shellcheck source=launch/bootstrap.sh
source "$(dirname "${BASH_SOURCE[0]}")/bootstrap.sh"
cd "$MEGAVERL_ROOT" || exit
if [[ -z "${MEGAVERL_PYTHON:-}" && "$_base_lock" == "$_cpu_lock" ]]; then
    _bootstrap environments tinker tinker-recipes trackio
    # reasoning-gym has a part that is compiled; without it its tests are skipped.
    has_headers='import os, sysconfig as s; raise SystemExit(not os.path.exists(s.get_path("include") + "/Python.h"))'
    ! command -v cc >/dev/null || ! "$PYTHON" -c "$has_headers" || _bootstrap reasoning-gym
fi

# One thread per process: the tests run several processes on few cores. No test may reach for a hub.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
export HF_HUB_OFFLINE=1 MPLBACKEND=Agg
export RES_OPTIONS="${RES_OPTIONS:-timeout:1 attempts:5}" # as megaverl.rank_environment says
# An environment for a CPU is tested on the CPU, whatever else is here.
[[ -n "${MEGAVERL_PYTHON:-}" || "$_base_lock" != "$_cpu_lock" ]] || export CUDA_VISIBLE_DEVICES=""

# Environments beside .venv are filled while ruff and mypy read what .venv has. Their output is no terminal, on which each
# would count seconds in the same line.
_install_harnesses_and_agents() {
    local name
    _install_harnesses || _say "left out: tests with inspect-ai and lm-eval"
    for name in harbor nemo-gym; do
        _install_beside "$name" || _say "left out: tests of $name, which needs Python 3.12 (.venv/install.log)"
    done
}
if [[ -z "${MEGAVERL_PYTHON:-}" && "$_base_lock" == "$_cpu_lock" ]]; then
    _install_harnesses_and_agents 2>&1 | cat >&2 &
    # Below, both return at once if they are done by then.
    [[ $# -gt 0 || -n "${MEGAVERL_TEST_NEWER:-}" || "$_base_lock" != "cpu-py311" ]] ||
        { _install_newer && _install_py312; } 2>&1 | cat >&2 &
fi
failed=0
"$PYTHON" -m ruff check . || failed=1
"$PYTHON" -m ruff format --check . || failed=1
"$PYTHON" -m mypy || failed=1
wait
((!failed)) || exit 1
((!$#)) || exec "$PYTHON" -m pytest "$@"

# What depends most on megatron-core; tests/cuda is what stands for GPUs.
of_megatron_core=(
    tests/checkpoint/test_resume.py
    tests/config/test_passthrough.py
    tests/models/test_options.py
    tests/models/test_parity.py
    tests/models/test_transformer_engine.py
    tests/planner/test_muon_bytes.py
    tests/workers/test_moe_invariance.py
    tests/workers/test_muon.py
)
workers=(--numprocesses 2 --dist loadfile --no-loadscope-reorder)
code=0 others=()
_tested() {
    _say "tests with $1:"
    "$1" -m pytest "${workers[@]}" "${@:2}" || code=$?
}
if [[ -n "${MEGAVERL_TEST_NEWER:-}" ]]; then
    _tested "$MEGAVERL_TEST_NEWER" tests/cuda "${of_megatron_core[@]}"
elif [[ -z "${MEGAVERL_PYTHON:-}" && "$_base_lock" == "cpu-py311" ]] && _install_newer; then
    others=(--ignore tests/cuda) # minutes; once, with what runs on GPUs
    if _install_py312; then
        _tested "$_of_py312/bin/python" "${of_megatron_core[@]}"
        of_megatron_core=()
    else
        _say "left out: tests under Python 3.12, which is not found, or could not be filled (.venv/install.log)"
    fi
    _tested "$_newer/bin/python" tests/cuda "${of_megatron_core[@]}"
elif [[ -n "${MEGAVERL_PYTHON:-}" || "$_base_lock" == "cpu-py311" ]]; then
    _say "left out: tests with the megatron-core of the GPUs' lock"
fi
_tested "$PYTHON" "${others[@]}"
exit "$code"
