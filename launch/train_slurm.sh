#!/usr/bin/env bash
#SBATCH --job-name=megaverl
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --output=slurm-%x-%j.log
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
#
# Training under SLURM, one torchrun agent per node; a job that was cut off goes on from its last checkpoint
# when it is submitted again with the same run.name (checkpoint.resume=auto). Five minutes before the end of its time,
# and when it is preempted, the run saves and leaves with exit code 75, and the job puts itself into the queue again.
#
#   sbatch --nodes=8 launch/train_slurm.sh --config configs/llama3_70b/grpo_8_nodes.yaml key=value ...
#
# --mem=0 asks for all memory of a node: by default a job may get a share of it for each core, which pinned copies and
# checkpoints exceed.
#
# Submit from the top of the repository. MEGAVERL_PYTHON, NPROC, COMMAND and what else launch/train_multi_node.sh knows
# are passed on. In a container (pyxis and enroot; an image of docker/Dockerfile):
#
#   CONTAINER_IMAGE=megaverl.sqsh CONTAINER_MOUNTS=/data:/data sbatch launch/train_slurm.sh --config ...
set -euo pipefail

# sbatch runs a copy of this file, so its own place says nothing of the repository's.
root="${SLURM_SUBMIT_DIR:?submit with sbatch from the top of the repository}"

NNODES="$SLURM_JOB_NUM_NODES"
MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
# One port per job, so that two jobs on a node do not meet.
MASTER_PORT="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}"
export NNODES MASTER_ADDR MASTER_PORT
# shellcheck source=launch/container.sh
source "$root/launch/container.sh"

# SLURM_NODEID is known inside a task only, hence the inner shell.
# A rank that is lost ends all others within a minute, and each says why, so nothing is killed before that.
# Since SLURM 22.05 srun does not take --cpus-per-task from sbatch: bound, all ranks of a node would share one core.
# shellcheck disable=SC2016
srun --cpu-bind=none --kill-on-bad-exit=0 --wait=120 "${container[@]}" bash -c 'NODE_RANK="$SLURM_NODEID" exec "$0" "$@"' \
    "$root/launch/train_multi_node.sh" "$@" &
step=$!
# SLURM signals this script alone (B:); srun takes SIGUSR1 to all tasks of its step.
trap 'kill -USR1 "$step"' USR1 TERM
status=0
wait "$step" || status=$?
while kill -0 "$step" 2>/dev/null; do # a signal ends `wait` before the step has ended
    status=0
    wait "$step" || status=$?
done
if ((status == 75)); then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
