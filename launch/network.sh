#!/usr/bin/env bash
# Settings of GPUs and network that matter for a run, each with its reason. Sourced by the launch scripts; nothing here
# is read again once the ranks run. What you have set yourself stays.
set -euo pipefail # for the script that sources this one, too

# --- Which network ---------------------------------------------------------------------------------------------------
# Without these NCCL and gloo take the first interface that they find, which may be the slow one.
#   NCCL_SOCKET_IFNAME=eth0    of NCCL's first contact; GLOO_SOCKET_IFNAME=eth0: of reports, decisions, checkpoints
#   NCCL_IB_HCA=mlx5           which InfiniBand or RoCE adapters carry the data
if [[ -n "${MEGAVERL_INTERFACE:-}" ]]; then
    export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-$MEGAVERL_INTERFACE}"
    export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$MEGAVERL_INTERFACE}"
fi

# --- Names -----------------------------------------------------------------------------------------------------------
# For every connection to the job's store torch asks the name service for the other's name (torch 2.13, c10d/socket.cpp),
# and where an answer is lost asks again after 5 seconds, in which no other rank is served: ask again after one.
# `megaverl doctor` says how long such a question takes here, and how to spare it.
export RES_OPTIONS="${RES_OPTIONS:-timeout:1 attempts:5}"

# --- Order of kernels ------------------------------------------------------------------------------------------------
# Tensor, context and sequence parallelism overlap their collectives with the work around them only if kernels start in
# the order in which they were queued, so up to Hopper with one hardware queue (megatron-core 0.19.2,
# training/arguments.py and tensor_parallel/layers.py). From Blackwell on (compute capability 10) it asks for that no
# more, and one queue would only hinder. FSDP wants several on any GPU: set CUDA_DEVICE_MAX_CONNECTIONS=8 for it.
_oldest_gpu="$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | sort -n | head -n 1 || true)"
if [[ "$_oldest_gpu" =~ ^[0-9]+\. ]] && ((${_oldest_gpu%%.*} < 10)); then
    export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
fi
unset _oldest_gpu

# --- NCCL ------------------------------------------------------------------------------------------------------------
# Buffers of collectives in CUDA graphs are registered with NCCL by default (src/enqueue.cc: GRAPH_REGISTER, 1), which
# pins them: an engine that sleeps could not give its graphs' memory back (vLLM 0.32 sets 0 for that itself, but in a
# process that trains as well NCCL has read it by then), and with expandable segments the memory may be gone
# (megatron-core 0.19.2 refuses, transformer/cuda_graphs.py).
export NCCL_GRAPH_REGISTER="${NCCL_GRAPH_REGISTER:-0}"

# Left alone on purpose, each with its default:
#   NCCL_CUMEM_ENABLE   (-2, by driver: src/misc/cudawrap.cc) once had to be 0 for vLLM; 0.32 asks for nothing. Whoever
#                       sets it must do so on all ranks alike.
#   NCCL_NVLS_ENABLE    (2, where NVSwitch has it: src/transport/nvls.cc) sums in the switch, in another order than
#                       rings do. 0 saves its buffers on each communicator inside a node, and torch's deterministic mode
#                       and vLLM's batch invariance turn it off themselves.
#   NCCL_ALGO, NCCL_PROTO, NCCL_NTHREADS, buffer sizes: NCCL chooses by message and topology, and what helps one
#                       collective here slows another.
# NCCL_DEBUG=WARN (INFO to see rings and adapters) when something is wrong.
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"

# --- When ranks wait for each other for ever -------------------------------------------------------------------------
# torch's flight recorder keeps the last collectives of each rank: which, of which group and shapes, how far (torch 2.13,
# FlightRecorder.hpp; TORCH_FR_BUFFER_SIZE goes before this name). megaverl reads from it what a rank waits in when it
# says who stalls, and torch writes it to TORCH_NCCL_DEBUG_INFO_TEMP_FILE followed by the rank, which `megaverl train`
# puts into the run's folder, if its own deadline passes first. It costs some microseconds a collective.
export TORCH_NCCL_TRACE_BUFFER_SIZE="${TORCH_NCCL_TRACE_BUFFER_SIZE:-2000}"
export TORCH_NCCL_DUMP_ON_TIMEOUT="${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}"
