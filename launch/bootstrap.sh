#!/usr/bin/env bash
# Makes .venv at the top of the repository from the lock files, once; later calls return at once.
#
#   source launch/bootstrap.sh            # what quickstart.sh and test.sh do; sets $MEGAVERL_ROOT and $PYTHON
#   ./launch/bootstrap.sh gsm8k bench     # the same, with further locks from requirements/
#
# MEGAVERL_PYTHON=/path/to/python   use this interpreter, which already has everything; install nothing
#                                   (GPU machines and containers).
# MEGAVERL_TORCH_INDEX=URL          where torch's CPU wheel is, instead of PyTorch's own index; "none": pip's
#                                   own sources have it. A torch wheel in a find-links folder is found unasked.

set -euo pipefail # for the script that sources this one, too

MEGAVERL_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
_venv="$MEGAVERL_ROOT/.venv"
_log="$_venv/install.log"
_base_lock="cpu-py311"
_torch_cpu_index="https://download.pytorch.org/whl/cpu"
_uv="uv==0.13.9"

_say() { printf 'megaverl: %s\n' "$*" >&2; }

# The stamp of a lock: what was installed, from which files, at which place.
_stamp_of() {
    local files=("$MEGAVERL_ROOT/requirements/$1.lock")
    [[ "$1" == "$_base_lock" ]] && files+=("$MEGAVERL_ROOT/setup.py" "$MEGAVERL_ROOT/megaverl/version.py")
    { echo "$MEGAVERL_ROOT"; cat "${files[@]}"; } | sha256sum | cut -d' ' -f1
}

_is_installed() {
    [[ ! -e "$_venv/.installing" && -r "$_venv/stamps/$1" && -x "$_venv/bin/python" ]] || return 1
    [[ "$(<"$_venv/stamps/$1")" == "$(_stamp_of "$1")" ]]
}

# A Python 3.11 that can make virtual environments. A name on PATH may be a shim that does not run: try each.
_find_python() {
    local candidate
    while IFS= read -r candidate; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return 0
        fi
    done < <(type -a -p python3.11 python3 python 2>/dev/null || true)
    _say "needs Python 3.11 with the venv module, and found none on PATH."
    _say "Install it (Debian/Ubuntu: python3.11 and python3.11-venv; or pyenv install 3.11), or set"
    _say "MEGAVERL_PYTHON to an interpreter that already has torch, megatron-core and vLLM."
    return 1
}

# Sets `pip`, `uv` (nothing where it cannot be had) and `wheel_folders`. uv looks where pip would.
_find_installers() {
    local python="$_venv/bin/python" settings=() variables=() arguments=() i
    pip=("$python" -m pip --disable-pip-version-check install --no-input --no-deps)
    uv=() wheel_folders=()
    mapfile -t settings < <("$python" -m pip config list 2>/dev/null | "$python" "$MEGAVERL_ROOT/launch/pip_settings.py")
    for ((i = 0; i < ${#settings[@]}; i++)); do
        case "${settings[i]}" in
            [A-Z]*=*) variables+=("${settings[i]}") ;;
            --find-links) wheel_folders+=("${settings[i + 1]#file://}") ;;& # and is an argument
            *) arguments+=("${settings[i]}") ;;
        esac
    done
    if _logged "fetching uv" "${pip[@]}" "$_uv"; then
        uv=(env "${variables[@]}" "$_venv/bin/uv" pip install --python "$python" --no-deps "${arguments[@]}")
    else
        _say "uv could not be fetched; pip serves, and takes a few minutes"
    fi
}

# Installs with uv, several times as quick, or else with pip.
_fetch() {
    local what="$1"
    shift
    if ((${#uv[@]})); then
        _logged "$what" "${uv[@]}" "$@" && return
        _say "$what with uv failed (see .venv/install.log); pip is tried, and takes a few minutes"
    fi
    _logged "$what" "${pip[@]}" "$@"
}

# Options for torch's CPU wheel: none when one lies in a find-links folder.
_torch_options() {
    local version="${1#torch==}" index="${MEGAVERL_TORCH_INDEX:-}" folder wheels
    if [[ -z "$index" ]]; then
        for folder in "${wheel_folders[@]}"; do
            wheels=("$folder"/torch-"${version%%+*}"*cpu*cp311*.whl)
            [[ -e "${wheels[0]}" ]] && index="none"
        done
    fi
    [[ "$index" == "none" ]] || printf '%s\n' --extra-index-url "${index:-$_torch_cpu_index}"
}

# Runs a command with its output in the log; on a terminal a line tells for how long.
_logged() {
    local what="$1" ticker=""
    shift
    printf '\n$ %s\n' "$*" >>"$_log"
    if [[ -t 2 ]]; then
        _tick "$what" &
        ticker=$!
    fi
    local code=0
    "$@" >>"$_log" 2>&1 </dev/null || code=$?
    if [[ -n "$ticker" ]]; then
        kill "$ticker" 2>/dev/null || true
        wait "$ticker" 2>/dev/null || true
        printf '\r\033[K' >&2
    fi
    return "$code"
}

_tick() {
    local begin=$SECONDS
    while kill -0 $$ 2>/dev/null; do
        printf '\r\033[Kmegaverl: %s: %d s' "$1" "$((SECONDS - begin))" >&2
        sleep 1
    done
}

_explain_failure() {
    _say "$1 failed. The last lines of ${_log}:"
    tail -n 15 "$_log" | sed 's/^/    /' >&2
    _say "If a package could not be fetched, check the network or pip's settings (pip config list)."
    _say "If it was torch: its CPU wheel comes from $_torch_cpu_index;"
    _say "put the wheel into a folder and set PIP_FIND_LINKS=FOLDER, or set MEGAVERL_TORCH_INDEX=URL."
    _say "Then run the same command again; it starts over cleanly."
}

# Installs one lock. Called with the install lock held.
_install() {
    local name="$1" lock="$MEGAVERL_ROOT/requirements/$1.lock" torch_line base_python options=()
    local pip uv wheel_folders
    # An interrupted install can leave half a package that is taken for whole: begin again.
    if [[ -e "$_venv/.installing" || ! -x "$_venv/bin/python" ]] || ! "$_venv/bin/python" -m pip --version >/dev/null 2>&1; then
        base_python="$(_find_python)" || return 1
        mkdir -p "$_venv"
        touch "$_venv/.installing"
        find "$_venv" -mindepth 1 -maxdepth 1 ! -name .installing -exec rm -rf {} +
        if ! _logged "making .venv" "$base_python" -m venv "$_venv"; then
            _explain_failure "making .venv with $base_python"
            return 1
        fi
    fi
    touch "$_venv/.installing"
    : >"$_log"
    local begin=$SECONDS
    _say "installing $(grep -c == "$lock") pinned packages ($name) into .venv, once; log: .venv/install.log"
    _find_installers
    torch_line="$(grep -E '^torch==' "$lock" || true)"
    if [[ -n "$torch_line" ]]; then
        mapfile -t options < <(_torch_options "$torch_line")
        if ! _fetch "installing torch" "${options[@]}" "$torch_line"; then
            _explain_failure "installing $torch_line"
            return 1
        fi
    fi
    if ! _fetch "installing" -r "$lock"; then
        _explain_failure "installing requirements/$name.lock"
        return 1
    fi
    if [[ "$name" == "$_base_lock" ]] &&
        ! _fetch "installing megaverl" --no-build-isolation -e "$MEGAVERL_ROOT"; then
        _explain_failure "installing megaverl itself"
        return 1
    fi
    mkdir -p "$_venv/stamps"
    _stamp_of "$name" >"$_venv/stamps/$name"
    rm -f "$_venv/.installing"
    _say "installed in $((SECONDS - begin)) s"
}

# Holds the install lock (on the launch folder itself, so that no file is left) while it installs what is missing.
_install_missing() (
    exec 9<"$MEGAVERL_ROOT/launch"
    if command -v flock >/dev/null && ! flock --nonblock 9; then
        _say "another process is installing into .venv; waiting for it"
        flock 9
    fi
    for name in "$@"; do
        _is_installed "$name" || _install "$name" || exit 1
    done
)

_bootstrap() {
    local name
    for name in "$@"; do
        if [[ ! -r "$MEGAVERL_ROOT/requirements/$name.lock" ]]; then
            _say "there is no requirements/$name.lock; there are: $(cd "$MEGAVERL_ROOT/requirements" && echo *.lock)"
            return 1
        fi
    done
    for name in "$@"; do
        if ! _is_installed "$name"; then
            _install_missing "$@"
            return
        fi
    done
}

if [[ -n "${MEGAVERL_PYTHON:-}" ]]; then
    PYTHON="$(command -v "$MEGAVERL_PYTHON")" || { _say "MEGAVERL_PYTHON=$MEGAVERL_PYTHON is no program"; exit 1; }
    export PYTHONPATH="$MEGAVERL_ROOT${PYTHONPATH:+:$PYTHONPATH}"
elif [[ "${BASH_SOURCE[0]}" == "$0" ]]; then
    PYTHON="$_venv/bin/python"
    _bootstrap "$_base_lock" "$@"
else
    PYTHON="$_venv/bin/python"
    _bootstrap "$_base_lock"
fi
PATH="$(dirname "$PYTHON"):$PATH"
export PATH
