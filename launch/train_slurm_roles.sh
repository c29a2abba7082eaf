#!/usr/bin/env bash
#SBATCH --job-name=megaverl-roles
#SBATCH --time=24:00:00
#SBATCH --output=slurm-%x-%j.log
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
#SBATCH --nodes=8 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=96 --exclusive --mem=0
#SBATCH hetjob
#SBATCH --nodes=5 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=96 --exclusive --mem=0
#SBATCH hetjob
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=96 --exclusive --mem=0
#SBATCH hetjob
#SBATCH --nodes=1 --ntasks-per-node=1 --cpus-per-task=8
#
# Training under SLURM with groups of nodes for the roles, which may be of different kinds: one heterogeneous job, a
# group for each of ROLES, in this order. The first group has the rendezvous.
#
#   ROLES="train rollout reward,critic coordinator" sbatch launch/train_slurm_roles.sh --config FILE key=value ...
#
# Change the groups above, or give them on sbatch's command line, with `:` between them. A coordinator's node needs no
# GPU: it has one rank (NPROC_OF_COORDINATOR). Saving, leaving with 75, requeueing and containers (CONTAINER_IMAGE) are
# those of train_slurm.sh.
set -euo pipefail

root="${SLURM_SUBMIT_DIR:?submit with sbatch from the top of the repository}"
read -r -a roles <<<"${ROLES:-train rollout reward,critic coordinator}"
if ((${SLURM_HET_SIZE:-1} != ${#roles[@]})); then
    echo "train_slurm_roles.sh: ${SLURM_HET_SIZE:-1} groups of nodes for ${#roles[@]} roles (ROLES=${roles[*]})." >&2
    exit 2
fi

# Nodes are counted group by group, so the ranks of a role are neighbours.
hosts=()
groups=()
for group in "${!roles[@]}"; do
    list="SLURM_JOB_NODELIST_HET_GROUP_$group"
    mapfile -t here < <(scontrol show hostnames "${!list}")
    hosts+=("${here[@]}")
    for _ in "${here[@]}"; do groups+=("$group"); done
done
export NNODES="${#hosts[@]}" MASTER_ADDR="${hosts[0]}" MASTER_PORT="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}"

# shellcheck source=launch/container.sh
source "$root/launch/container.sh"

steps=()
first=0
for group in "${!roles[@]}"; do
    role="${roles[group]}"
    processes="${NPROC:-}"
    [[ "$role" == coordinator ]] && processes="${NPROC_OF_COORDINATOR:-1}"
    # Not bound to cores, for the reason in train_slurm.sh.
    # shellcheck disable=SC2016 # a node knows its number within its group
    FIRST="$first" ROLE="$role" NPROC="$processes" srun --het-group="$group" --cpu-bind=none --kill-on-bad-exit=0 \
        --wait=120 "${container[@]}" bash -c 'NODE_RANK=$((FIRST + SLURM_NODEID)) exec "$0" "$@"' "$root/launch/train_multi_node.sh" "$@" &
    steps+=("$!")
    for other in "${groups[@]}"; do ((other != group)) || first=$((first + 1)); done
done

# SLURM signals this script alone (B:); each srun takes SIGUSR1 to the tasks of its group.
trap 'kill -USR1 "${steps[@]}" 2>/dev/null || true' USR1 TERM
result=0
for step in "${steps[@]}"; do
    status=0
    wait "$step" || status=$?
    while kill -0 "$step" 2>/dev/null; do # a signal ends `wait` before the step has ended
        status=0
        wait "$step" || status=$?
    done
    ((status == 0 || result != 0)) || result=$status
done
if ((result == 75)); then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$result"
