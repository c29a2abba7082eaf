#!/usr/bin/env bash
# Settings of the network that matter for a run over several machines. Sourced by the launch scripts; nothing here is
# read again once the ranks run. What you have set yourself stays.
set -euo pipefail # for the script that sources this one, too

# Which network. Without these NCCL and gloo take the first interface that they find, which may be the slow one.
#   NCCL_SOCKET_IFNAME=eth0    of NCCL's first contact; GLOO_SOCKET_IFNAME=eth0: of reports, decisions, checkpoints
#   NCCL_IB_HCA=mlx5           which InfiniBand or RoCE adapters carry the data
if [[ -n "${MEGAVERL_INTERFACE:-}" ]]; then
    export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-$MEGAVERL_INTERFACE}"
    export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$MEGAVERL_INTERFACE}"
fi

# Tensor parallelism overlaps its collectives with the work around them only if kernels start in the order in which
# they were queued (megatron-core asks for it on GPUs before Blackwell).
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"

# Left alone on purpose: NCCL_ALGO, NCCL_PROTO, NCCL_NTHREADS, buffer sizes. NCCL chooses by message and topology, and
# what helps one collective here slows another. NCCL_DEBUG=WARN (INFO to see rings and adapters) when something is wrong.
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
