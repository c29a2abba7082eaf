#!/usr/bin/env bash
# SLURM with containers, by pyxis and enroot. Sourced by the SLURM scripts, with `root` set; they give `container` to
# srun, which is empty without CONTAINER_IMAGE.
#
# CONTAINER_IMAGE    a squashfs file, or REGISTRY#NAME:TAG (enroot import docker://... makes a file once for all nodes)
# CONTAINER_MOUNTS   further SRC:DST,...; the repository and the folder of the job are mounted under their own names
# shellcheck disable=SC2034,SC2154 # set and used by the script that sources this one
set -euo pipefail

container=()
if [[ -n "${CONTAINER_IMAGE:-}" ]]; then
    mounts="$root:$root"
    [[ "$PWD" == "$root" ]] || mounts+=",$PWD:$PWD"
    container=(
        --container-image="$CONTAINER_IMAGE"
        --container-mounts="$mounts${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}"
        --container-workdir="$PWD"
    )
fi
