#!/usr/bin/env bash
# Makes .venv at the top of the repository from the lock files, once; later calls return at once. Python 3.11 or 3.12.
#
#   source launch/bootstrap.sh            # what quickstart.sh and test.sh do; sets $MEGAVERL_ROOT and $PYTHON
#   ./launch/bootstrap.sh gsm8k bench     # the same, with further locks from requirements/
#   ./launch/bootstrap.sh --gpu           # .venv with CUDA, vLLM and Transformer Engine, in the place of a CPU's; what
#                                         # has no wheel is built: needs Python 3.12, a CUDA toolkit and a compiler
#
# MEGAVERL_PYTHON=/path/to/python   use this interpreter, which already has everything; install nothing
#                                   (GPU machines and containers).
# MEGAVERL_TORCH_INDEX=URL          where torch's CPU wheel is, instead of PyTorch's own index; "none": pip's
#                                   own sources have it. A torch wheel in a find-links folder is found unasked.

set -euo pipefail # for the script that sources this one, too

MEGAVERL_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
_venv="$MEGAVERL_ROOT/.venv"
_log="$_venv/install.log" _limit=()
_cpu_lock="cpu-py311" _gpu_lock="cuda-py312" _base_lock="cpu-py311" # `_choose_locks` sets the first and the last
_torch_cpu_index="https://download.pytorch.org/whl/cpu"
_uv="uv==0.13.9"

_say() { printf 'megaverl: %s\n' "$*" >&2; }

# What .venv was made of; at first Python 3.11, or 3.12 where there is no other.
_choose_locks() {
    if [[ -e "$_venv/stamps/$_gpu_lock" ]]; then
        _base_lock="$_gpu_lock"
    elif [[ -e "$_venv/stamps/cpu-py312" ]] ||
        { [[ ! -e "$_venv/stamps/$_cpu_lock" ]] && ! _find_python "$_cpu_lock" && _find_python cpu-py312; } >/dev/null; then
        _cpu_lock="cpu-py312" _base_lock="cpu-py312"
    fi
}

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

# A Python of this minor version that can make virtual environments. A name on PATH may be a shim that does not run:
# try each.
_find_python() {
    local minor="${1#*-py3}" candidate probe folder="${PYENV_ROOT:-${HOME:-}/.pyenv}/versions"
    probe="import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, $minor))"
    while IFS= read -r candidate; do
        if "$candidate" -c "$probe" 2>/dev/null; then
            echo "$candidate"
            return 0
        fi
    done < <(type -a -p "python3.$minor" python3 python 2>/dev/null || true; compgen -G "$folder/3.$minor.*/bin/python")
    return 1
}

_explain_python() {
    local wanted="3.11 or 3.12" package="python3-venv of Debian 12 or Ubuntu 24.04"
    [[ "$1" != "$_gpu_lock" ]] || wanted="3.12" package="python3.12-venv of Ubuntu 24.04"
    _say "needs Python $wanted with the venv module, and found none on PATH."
    _say "Install it ($package; pyenv or uv python install 3.12), or set"
    _say "MEGAVERL_PYTHON to an interpreter that already has torch, megatron-core and vLLM."
}

# Packages without a wheel are compiled against the torch that is installed, for this machine's GPUs alone.
_prepare_builds() {
    local lock="$1" toolkit="${CUDA_HOME:-/usr/local/cuda}" wanted found
    [[ -x "$toolkit/bin/nvcc" ]] || toolkit="$(dirname "$(dirname "$(command -v nvcc || echo /no/nvcc)")")"
    wanted="$(sed -n 's/^cuda-toolkit==\([0-9]*\).*/\1/p' "$lock")"
    found="$("$toolkit/bin/nvcc" --version 2>/dev/null | sed -n 's/.*release \([0-9]*\)\..*/\1/p' || true)"
    if [[ "$found" != "$wanted" ]]; then
        [[ -z "$found" ]] && found="absent" || found="of CUDA $found"
        _say "flash-attn and Transformer Engine are built here, for CUDA $wanted as torch is; nvcc is $found."
        _say "Install the CUDA toolkit $wanted and set CUDA_HOME, or build docker/Dockerfile, which has it; or set"
        _say "MEGAVERL_PYTHON to an interpreter that already has torch, megatron-core and vLLM."
        return 1
    fi
    export CUDA_HOME="$toolkit" NVTE_BUILD_USE_NVIDIA_WHEELS="${NVTE_BUILD_USE_NVIDIA_WHEELS:-1}" # cuDNN's headers
    # FlashAttention 2's kernels are for 80, 90, 100 and 120: that of a GPU is the last one before its own. Each takes
    # as long as the others.
    export FLASH_ATTN_CUDA_ARCHS="${FLASH_ATTN_CUDA_ARCHS:-$(_architectures)}"
    # nproc would return OMP_NUM_THREADS where that is set.
    export MAX_JOBS="${MAX_JOBS:-$(_compilers "$(env -u OMP_NUM_THREADS nproc)" "$(_free_kilobytes)")}"
}

# Compilers at once, for this many cores and this much free memory: flash-attn's own rule (its setup.py, 2.8.3), half of
# the cores and 9 GB each, as nvcc compiles with four threads there. Transformer Engine has no rule by memory.
_compilers() {
    local by_cores=$(($1 / 2)) by_memory=$(($2 / 9000000))
    local jobs=$((by_cores < by_memory ? by_cores : by_memory))
    echo $((jobs > 1 ? jobs : 1))
}

# Free memory of the machine, or what a container's limit leaves of it.
_free_kilobytes() {
    local free limit used
    free="$(awk '/^MemAvailable/ {print $2}' /proc/meminfo)"
    limit="$(cat /sys/fs/cgroup/memory.max 2>/dev/null || true)"
    used="$(cat /sys/fs/cgroup/memory.current 2>/dev/null || true)"
    if [[ "$limit" =~ ^[0-9]+$ && "$used" =~ ^[0-9]+$ ]] && (((limit - used) / 1024 < free)); then
        free=$(((limit - used) / 1024))
    fi
    echo "$free"
}

_architectures() {
    local capability newest each found=()
    while read -r capability; do
        newest=80
        for each in 90 100 120; do ((${capability/./} < each)) || newest=$each; done
        found+=("$newest")
    done < <(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | sort -u || true)
    ((${#found[@]})) || found=(80 90 100 120)
    local IFS=";"
    echo "${found[*]}"
}

_has_gpu() { [[ -e /dev/nvidia0 || "$(nvidia-smi -L 2>/dev/null || true)" == "GPU "* ]]; }

# A GPU is there, and .venv has CPU wheels: what follows would train on the processor.
_warn_of_cpu_venv() {
    [[ "$_base_lock" == "$_cpu_lock" && "${CUDA_VISIBLE_DEVICES-0}" != "" ]] && _has_gpu || return 0
    _say "this machine has a GPU, and .venv computes on the processor alone. For the GPU: ./launch/bootstrap.sh --gpu"
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
        _say "$what with uv failed (see ${_log#"$MEGAVERL_ROOT/"}); pip is tried, and takes a few minutes"
    fi
    _logged "$what" "${pip[@]}" "$@"
}

# Installs torch as a lock names it. Where its CPU wheel cannot be had, PyPI's build for CUDA, with all that it asks for,
# computes on a processor too.
_fetch_torch() {
    local line="$1" options=()
    mapfile -t options < <(_torch_options "$line" "$2")
    _fetch "installing torch" "${options[@]}" "$line" && return
    [[ "$line" == *+cpu && -z "${MEGAVERL_TORCH_INDEX:-}" ]] && ! _has_gpu || return 1
    _say "torch's CPU wheel could not be fetched; PyPI's build for CUDA serves, and takes 9 GB"
    _logged "installing torch for CUDA" "${pip[@]/--no-deps/--no-compile}" "${line%+cpu}"
}

# Options for torch's CPU wheel: none when one lies in a find-links folder.
_torch_options() {
    [[ "$1" == *+cpu ]] || return 0 # a CUDA build is on PyPI
    local version="${1#torch==}" index="${MEGAVERL_TORCH_INDEX:-}" folder wheels
    if [[ -z "$index" ]]; then
        for folder in "${wheel_folders[@]}"; do
            wheels=("$folder"/torch-"${version%%+*}"*cpu*"cp${2##*-py}"*.whl)
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
    "${_limit[@]}" "$@" >>"$_log" 2>&1 </dev/null || code=$?
    if [[ -n "$ticker" ]]; then
        kill "$ticker" 2>/dev/null || true
        wait "$ticker" 2>/dev/null || true
        printf '\r\033[K' >&2
    fi
    return "$code"
}

# Imports what a lock has installed: a package that is there need not work.
_check_imports() {
    local problems problem code=0
    problems="$(cd / && "$_venv/bin/python" "$MEGAVERL_ROOT/launch/check_imports.py" "$1")" || code=$?
    while IFS= read -r problem; do
        [[ -z "$problem" ]] || _say "$problem"
    done <<<"$problems"
    if ((code)); then
        _say "Everything in $1 is installed, but not everything works. If the error names CUDA or a symbol, a package"
        _say "was built for another torch: remove ${_venv} and run the same command again. Otherwise please report it."
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

# Whether .venv was made of the other base lock.
_is_of_another() {
    [[ "$1" == "$_base_lock" ]] || return 1
    local other="$_cpu_lock"
    [[ "$1" == "$_cpu_lock" ]] && other="$_gpu_lock"
    [[ -e "$_venv/stamps/$other" ]]
}

# Installs one lock. Called with the install lock held.
_install() {
    local name="$1" lock="$MEGAVERL_ROOT/requirements/$1.lock" torch_line base_python wheels=() built=() package
    local pip uv wheel_folders
    torch_line="$(grep -E '^torch==' "$lock" || true)"
    mapfile -t wheels < <(grep -v '# no wheel' "$lock" | sed -n 's/^\([^# ]*==[^# ]*\).*/\1/p' | grep -v '^torch==')
    mapfile -t built < <(sed -n 's/^\([^# ]*==[^# ]*\) *# no wheel.*/\1/p' "$lock")
    ((${#built[@]} == 0)) || _prepare_builds "$lock" || return 1
    # An interrupted install can leave half a package that is taken for whole: begin again.
    if [[ -e "$_venv/.installing" || ! -x "$_venv/bin/python" ]] || _is_of_another "$name" ||
        ! "$_venv/bin/python" -m pip --version >/dev/null 2>&1; then
        if ! base_python="$(_find_python "$_base_lock")"; then
            _explain_python "$_base_lock"
            return 1
        fi
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
    _say "installing $(((${#torch_line} > 0) + ${#wheels[@]} + ${#built[@]})) pinned packages ($name) into ${_venv#"$MEGAVERL_ROOT/"}, once;" \
        "log: ${_log#"$MEGAVERL_ROOT/"}"
    _find_installers
    if [[ -n "$torch_line" ]] && ! _fetch_torch "$torch_line" "$name"; then
        _explain_failure "installing $torch_line"
        return 1
    fi
    if ! _fetch "installing" "${wheels[@]}"; then
        _explain_failure "installing requirements/$name.lock"
        return 1
    fi
    # One after the other: at once, each would start MAX_JOBS compilers.
    for package in "${built[@]}"; do
        _say "building $package: minutes to an hour, with MAX_JOBS=$MAX_JOBS"
        if ! _fetch "building" --no-build-isolation "$package"; then
            _explain_failure "building $package"
            return 1
        fi
    done
    if [[ "$name" == "$_base_lock" ]] &&
        ! _fetch "installing megaverl" --no-build-isolation -e "$MEGAVERL_ROOT"; then
        _explain_failure "installing megaverl itself"
        return 1
    fi
    rm -f "$_venv/.installing" # everything is there: what was built is kept, whatever the imports say
    _check_imports "$lock" || return 1
    mkdir -p "$_venv/stamps"
    _stamp_of "$name" >"$_venv/stamps/$name"
    _say "installed in $((SECONDS - begin)) s"
}

# Makes $_newer, for tests: what .venv has, but megatron-core as the GPUs' lock has it, and triton, which that one imports.
# Its wheels are for Python 3.11 too, though their metadata asks for 3.12.
_newer="$_venv/newer"
_install_newer() {
    local site wanted=()
    mapfile -t wanted < <(grep -E '^(megatron-core|triton)==' "$MEGAVERL_ROOT/requirements/$_gpu_lock.lock")
    [[ -r "$_newer/stamp" && "$(<"$_newer/stamp")" == "${wanted[*]}" ]] && return
    _say "installing ${wanted[*]} into .venv/newer, once"
    rm -rf "$_newer"
    _logged "making .venv/newer" "$PYTHON" -m venv --without-pip "$_newer" || return 1
    site="$("$_newer/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    if ! _logged "installing ${wanted[*]}" timeout 300 "$PYTHON" -m pip --disable-pip-version-check install --no-input \
        --no-deps --no-compile --only-binary :all: --ignore-requires-python --target "$site" "${wanted[@]}"; then
        _say "${wanted[*]} could not be installed in 300 s; see .venv/install.log"
        return 1
    fi
    "$PYTHON" -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
        >"$site/of_venv.pth"
    echo "${wanted[*]}" >"$_newer/stamp"
}

# Makes $_harnesses, for tests: what .venv has, and the evaluation harnesses of requirements/harnesses.lock. They are not
# in .venv, because every process with transformers would import their scikit-learn.
_harnesses="$_venv/harnesses"
_install_harnesses() {
    local site lock="$MEGAVERL_ROOT/requirements/harnesses.lock" wanted
    wanted="$(sha256sum "$lock")"
    [[ -r "$_harnesses/stamp" && "$(<"$_harnesses/stamp")" == "${wanted%% *}" ]] && return
    _say "installing inspect-ai and lm-eval into .venv/harnesses, once"
    rm -rf "$_harnesses"
    _logged "making .venv/harnesses" "$PYTHON" -m venv --without-pip "$_harnesses" || return 1
    site="$("$_harnesses/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    if ! _logged "installing inspect-ai and lm-eval" timeout 300 "$PYTHON" -m pip --disable-pip-version-check install \
        --no-input --no-deps --no-compile --target "$site" -r "$lock"; then
        _say "inspect-ai and lm-eval could not be installed in 300 s; see .venv/install.log"
        return 1
    fi
    "$PYTHON" -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
        >"$site/of_venv.pth"
    echo "${wanted%% *}" >"$_harnesses/stamp"
}

# Makes $_of_py312, for tests, where .venv is of Python 3.11 and there is a 3.12. No package may take over five minutes.
_of_py312="$_venv/py312"
_install_py312() {
    local _venv="$_of_py312" _log="$_of_py312/install.log" _base_lock="cpu-py312" _limit=(timeout 300)
    _is_installed "$_base_lock" && return
    _find_python "$_base_lock" >/dev/null && _install "$_base_lock"
}

# Makes .venv/NAME, for tests, of NAME-py312.lock: a package that shares no environment with megaverl, such as harbor.
_install_beside() {
    local name="$1" folder="$_venv/$1" lock="$MEGAVERL_ROOT/requirements/$1-py312.lock" python stamp wheels=()
    local pip uv wheel_folders
    stamp="$(sha256sum <"$lock")"
    [[ -r "$folder/stamp" && "$(<"$folder/stamp")" == "$stamp" ]] && return
    python="$(_find_python "$name-py312")" || return 1
    mapfile -t wheels < <(sed -n 's/^\([^# ]*==[^# ]*\).*/\1/p' "$lock")
    _say "installing ${#wheels[@]} pinned packages ($name-py312) into .venv/$name, once"
    rm -rf "$folder"
    _logged "making .venv/$name" "$python" -m venv "$folder" || return 1
    local _venv="$folder" _limit=(timeout 300)
    _find_installers
    _fetch "installing $name" "${wheels[@]}" || return 1
    echo "$stamp" >"$folder/stamp"
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
    _choose_locks
    if [[ "${1:-}" == "--gpu" ]]; then
        _base_lock="$_gpu_lock"
        shift
    fi
    _bootstrap "$_base_lock" "$@"
else
    PYTHON="$_venv/bin/python"
    _choose_locks
    _bootstrap "$_base_lock"
fi
[[ -n "${MEGAVERL_PYTHON:-}" ]] || _warn_of_cpu_venv
PATH="$(dirname "$PYTHON"):$PATH"
export PATH
