#!/usr/bin/env bash
# Training on several machines: run the same line on each of them, with its own NODE_RANK.
#
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=host0 ./launch/train_multi_node.sh --config FILE key=value ...
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=host0 ./launch/train_multi_node.sh --config FILE key=value ...
#
# NNODES, NODE_RANK, MASTER_ADDR   how many machines, which one this is (from 0), and the name of machine 0.
#                   NNODES=MIN:MAX goes on with fewer after a failure, and needs no NODE_RANK
# MASTER_PORT       a free port of machine 0 (default 29500)
# NPROC             processes on each machine (default: one per GPU)
# ROLE              what this machine is: rollout, reward, critic, reference, train or coordinator, several with commas
#                   (default: what `placement` in the configuration says; without it every role is everywhere)
# JOIN_MINUTES      how long the machines wait for each other before any process starts (default 10)
# MAX_RESTARTS      how often the ranks are started again after a failure, from the last checkpoint (default 0)
# LAUNCHER          torchrun's agent (default), or ft_launcher of nvidia-resiliency-ext: with NNODES=MIN:MAX the machines
#                   above MIN are spares, which take the place of one that fails (docs/first_gpu_hour.md)
# JOB_ID            what tells this job from others where NNODES is MIN:MAX (default: megaverl)
# MEGAVERL_PYTHON   interpreter to use (default: .venv/bin/python if it is there, else python)
# COMMAND           train (default), sft, eval or generate
#
# The configuration, the model, the data and run.dir must be reachable under the same paths on every machine.
set -euo pipefail

LAUNCHER="${LAUNCHER:-torchrun}"
case "$LAUNCHER" in
    torchrun | ft_launcher) ;;
    *)
        echo "train_multi_node.sh: LAUNCHER=$LAUNCHER; it is torchrun or ft_launcher." >&2
        exit 2
        ;;
esac
needed=(NNODES MASTER_ADDR)
elastic=yes # the rendezvous counts the machines
if [[ "${NNODES:-}" != *:* && "$LAUNCHER" == torchrun ]]; then
    elastic=""
    needed+=(NODE_RANK)
fi
for name in "${needed[@]}"; do
    if [[ -z "${!name:-}" ]]; then
        echo "train_multi_node.sh: set $name. See the head of launch/train_multi_node.sh." >&2
        exit 2
    fi
done

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${MEGAVERL_PYTHON:-$([[ -x "$root/.venv/bin/python" ]] && echo "$root/.venv/bin/python" || echo python)}"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

if [[ -z "${NPROC:-}" ]]; then
    NPROC="$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)"
    if ((NPROC == 0)); then
        echo "train_multi_node.sh: no GPU found; set NPROC, the number of processes on this machine." >&2
        exit 2
    fi
fi

command=(-m megaverl.cli.main "${COMMAND:-train}" ${ROLE:+--role "$ROLE"} "$@")
seconds=$((60 * ${JOIN_MINUTES:-10}))
nodes=(--nnodes "$NNODES" --nproc-per-node "$NPROC" --max-restarts "${MAX_RESTARTS:-0}")
endpoint="$MASTER_ADDR:${MASTER_PORT:-29500}"
if [[ "$LAUNCHER" == ft_launcher ]]; then
    # Our ranks find out by themselves who stalls (run.timeout_minutes), and send its monitor no heartbeats.
    exec "$python" -m nvidia_resiliency_ext.fault_tolerance.launcher "${nodes[@]}" \
        --rdzv-backend c10d --rdzv-endpoint "$endpoint" --rdzv-id "${JOB_ID:-megaverl}" \
        --rdzv-conf "join_timeout=$seconds" --ft-log-level INFO "${command[@]}" # it wants some setting of its own
elif [[ -n "$elastic" ]]; then
    # Machines come and go: c10d's rendezvous counts them. Its store listens on all interfaces (docs/scale.md).
    exec "$python" -m megaverl.trainer.elastic_agent "${nodes[@]}" \
        --rdzv-backend c10d --rdzv-endpoint "$endpoint" --rdzv-id "${JOB_ID:-megaverl}" \
        --rdzv-conf "join_timeout=$seconds" "${command[@]}"
fi
# A fixed address instead of a rendezvous service: it also works where a host does not know itself by name.
# This agent is torchrun's, which passes SIGTERM and SIGUSR1 on to the ranks: they save, and it ends with 75.
exec "$python" -m megaverl.trainer.elastic_agent \
    --nnodes "$NNODES" --node-rank "$NODE_RANK" --nproc-per-node "$NPROC" \
    --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}" \
    --rdzv-conf "timeout=$seconds" --max-restarts "${MAX_RESTARTS:-0}" "${command[@]}"
