"""SLURM's commands as small scripts, to see what a batch script does with them: every node is this machine."""

from __future__ import annotations

from pathlib import Path

# The script runs as a copy, with the allocation that its own #SBATCH lines ask for: a
# group of nodes for each part.
SBATCH = r"""#!/usr/bin/env bash
script=$1; shift
cp "$script" "$SHIMS/slurm_script"
export SLURM_JOB_ID=4711 SLURM_SUBMIT_DIR="$PWD" SLURM_HET_SIZE=0
while read -r line; do
    [[ "$line" =~ --nodes=([0-9]+) ]] || continue
    export "SLURM_JOB_NODELIST_HET_GROUP_$SLURM_HET_SIZE=group$SLURM_HET_SIZE-[1-${BASH_REMATCH[1]}]"
    SLURM_HET_SIZE=$((SLURM_HET_SIZE + 1))
done < <(grep '^#SBATCH' "$script")
exec bash "$SHIMS/slurm_script" "$@"
"""
SCONTROL = r"""#!/usr/bin/env bash
if [[ "$1 $2" == "show hostnames" ]]; then
    for ((node = 1; node <= $(sed 's/.*-\([0-9]*\)]/\1/' <<<"$3"); node++)); do echo "${3%%-*}-$node"; done
else
    echo "$@" >>"$SHIMS/scontrol.log"
fi
"""
# A task on each node of the group; SIGUSR1 goes to all of them, and the highest of
# their codes is its own.
SRUN = r"""#!/usr/bin/env bash
while [[ "$1" == --* ]]; do
    case "$1" in
        --het-group=*) group="${1#*=}" ;;
        --container-*) echo "$1" >>"$SHIMS/container.log" ;;
        --cpu-*) echo "$1" >>"$SHIMS/cores.log" ;;
    esac
    shift
done
list="SLURM_JOB_NODELIST_HET_GROUP_$group"
tasks=()
trap 'kill -USR1 "${tasks[@]}"' USR1
for ((node = 0; node < $(sed 's/.*-\([0-9]*\)]/\1/' <<<"${!list}"); node++)); do
    SLURM_NODEID=$node SLURMD_NODENAME="group$group-$((node + 1))" "$@" &
    tasks+=("$!")
done
result=0
for task in "${tasks[@]}"; do
    status=0
    wait "$task" || status=$?
    while kill -0 "$task" 2>/dev/null; do status=0; wait "$task" || status=$?; done
    ((status <= result)) || result=$status
done
exit "$result"
"""
# In the place of Python: notes its command line, and waits for SIGUSR1 to leave with 75
# where it is told to.
PYTHON = r"""#!/usr/bin/env bash
[[ ! -e "$SHIMS/hold" ]] || trap 'exit 75' USR1
echo "$@" >"$SHIMS/node.$SLURMD_NODENAME.part"
mv "$SHIMS/node.$SLURMD_NODENAME.part" "$SHIMS/node.$SLURMD_NODENAME"
while [[ -e "$SHIMS/hold" ]]; do sleep 0.02; done
[[ ! -e "$SHIMS/fails.$SLURMD_NODENAME" ]] || exit 1
"""


def write(folder: Path) -> dict[str, str]:
    """Put them into `folder`; the environment in which a script finds them."""
    for name, text in {
        "sbatch": SBATCH,
        "scontrol": SCONTROL,
        "srun": SRUN,
        "python": PYTHON,
    }.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return {
        "SHIMS": str(folder),
        "MEGAVERL_PYTHON": str(folder / "python"),
        "NPROC": "8",
    }
