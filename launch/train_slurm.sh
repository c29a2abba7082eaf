#!/usr/bin/env bash
#SBATCH --job-name=megaverl
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --output=slurm-%x-%j.log
#
# Training under SLURM, one torchrun agent per node; a job that was cut off goes on from its last checkpoint
# when it is submitted again with the same run.name (checkpoint.resume=auto).
#
#   sbatch --nodes=8 launch/train_slurm.sh --config configs/grpo_llama3_70b.yaml key=value ...
#
# Submit from the top of the repository. MEGAVERL_PYTHON, NPROC and COMMAND are passed on
# (see launch/train_multi_node.sh).
set -euo pipefail

# sbatch runs a copy of this file, so its own place says nothing of the repository's.
root="${SLURM_SUBMIT_DIR:?submit with sbatch from the top of the repository}"

NNODES="$SLURM_JOB_NUM_NODES"
MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
# One port per job, so that two jobs on a node do not meet.
MASTER_PORT="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}"
export NNODES MASTER_ADDR MASTER_PORT

# SLURM_NODEID is known inside a task only, hence the inner shell.
srun --kill-on-bad-exit=1 bash -c 'NODE_RANK="$SLURM_NODEID" exec "$0" "$@"' \
    "$root/launch/train_multi_node.sh" "$@"
