#!/usr/bin/env bash
# A cluster in miniature, really networked: five nodes on this machine, each with its own network, address and name,
# one torchrun agent in each, and roles of their own: two that generate, one that scores and has the critic, one that
# trains, one that coordinates. They reach each other over a bridge; nothing of this machine's own network is touched.
#
#   sudo tools/netns_cluster.sh                                  # 10 steps of PPO on the quickstart's tiny model
#   sudo tools/netns_cluster.sh --config FILE key=value ...      # a run of your own: arguments of `megaverl train`
#   sudo CUT=gen-2 CUT_AFTER=3 tools/netns_cluster.sh ...        # after step 3, node gen-2 loses its cable
#
# CUT, CUT_AFTER    a node (gen-1, gen-2, score, train, coord), and the step after which its link goes down
# RUN_DIR           folder of the run (run.dir/run.name), which CUT watches; default: runs/netns
# MEGAVERL_PYTHON   interpreter to use (default: .venv/bin/python if it is there, else python3)
# LOGS              folder of what each node prints (default: a temporary one, shown at the end)
#
# Needs root and iproute2. Ends with 0 if every node did, else with the first other exit code; 77 where it cannot run.
set -euo pipefail

nodes=(gen-1 gen-2 score train coord)
roles=(rollout rollout "reward,critic" train coordinator)
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${MEGAVERL_PYTHON:-$([[ -x "$root/.venv/bin/python" ]] && echo "$root/.venv/bin/python" || echo python3)}"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

cannot() {
    echo "netns_cluster.sh: $1" >&2
    exit 77
}
[[ "$(id -u)" == 0 ]] || cannot "needs root, to make networks."
command -v ip >/dev/null || cannot "needs \`ip\`: install iproute2."
name="mv$$"
ip netns add "$name-switch" 2>/dev/null || cannot "this machine lets nobody make network namespaces (ip netns add)."

agents=()
clean_up() {
    for agent in "${agents[@]}"; do
        kill -KILL -- "-$agent" 2>/dev/null || true
    done
    for node in "${nodes[@]}"; do
        ip netns delete "$name-$node" 2>/dev/null || true
    done
    ip netns delete "$name-switch" 2>/dev/null || true
}
trap clean_up EXIT

# One bridge, and from it a cable to each node's eth0.
ip -n "$name-switch" link add bridge type bridge
ip -n "$name-switch" link set bridge up
for number in "${!nodes[@]}"; do
    node="${nodes[number]}"
    ip netns add "$name-$node"
    ip -n "$name-switch" link add "to-$node" type veth peer name eth0 netns "$name-$node"
    ip -n "$name-switch" link set "to-$node" master bridge up
    ip -n "$name-$node" address add "10.77.0.$((10 + number))/24" dev eth0
    ip -n "$name-$node" link set eth0 up
    ip -n "$name-$node" link set lo up
done

if (($# == 0)); then # the quickstart's task and model, made on the spot, without its warm-up
    RUN_DIR="${RUN_DIR:-runs/netns}"
    set -- --config "$root/configs/quickstart.yaml" "run.dir=$(dirname "$RUN_DIR")" "run.name=$(basename "$RUN_DIR")" \
        actor.tp=1 trainer.steps=10 trainer.validate_every=5 checkpoint.save_interval=5 run.timeout_minutes=2
    "$python" -c 'import sys
from megaverl.config import load_config
from megaverl.trainer.quickstart import prepare
prepare(load_config(sys.argv[2], sys.argv[3:], command="quickstart", check_paths=False))' "$@"
fi
logs="${LOGS:-$(mktemp -d)}"
mkdir -p "$logs"
set -m # each node in a process group of its own
for number in "${!nodes[@]}"; do
    node="${nodes[number]}"
    GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0 "$python" -IS "$root/megaverl/processes.py" $$ \
        ip netns exec "$name-$node" unshare --uts -- \
        sh -c 'hostname "$0"; exec "$@"' "$node" \
        "$python" -m megaverl.trainer.elastic_agent --nnodes "${#nodes[@]}" --node-rank "$number" --nproc-per-node 1 \
        --master-addr 10.77.0.10 --master-port 29500 \
        -m megaverl.cli.main train --role "${roles[number]}" "$@" >"$logs/$node.log" 2>&1 </dev/null &
    agents+=("$!")
done
set +m

if [[ -n "${CUT:-}" ]]; then
    metrics="${RUN_DIR:?set RUN_DIR to the folder of the run}/metrics.jsonl"
    until grep -q "\"step\": ${CUT_AFTER:-1}," "$metrics" 2>/dev/null; do
        sleep 0.1
        kill -0 "${agents[0]}" 2>/dev/null || break
    done
    ip -n "$name-switch" link set "to-$CUT" down
    echo "netns_cluster.sh: cut the link of $CUT after step ${CUT_AFTER:-1}"
fi

result=0
for number in "${!nodes[@]}"; do
    status=0
    wait "${agents[number]}" || status=$?
    echo "${nodes[number]} (${roles[number]}): exit code $status"
    ((status == 0 || result != 0)) || result=$status
done
for node in train gen-1; do
    sed "s/^/$node: /" "$logs/$node.log"
done
echo "logs: $logs"
exit "$result"
