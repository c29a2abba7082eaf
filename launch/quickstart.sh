#!/usr/bin/env bash
# The main job on an embedded default: a small model learns by PPO, on this machine, with nothing downloaded
# but the packages. Sets up .venv on the first run.
#
#   ./launch/quickstart.sh [key=value ...]      e.g. ./launch/quickstart.sh run.seed=1
# shellcheck source=launch/bootstrap.sh
source "$(dirname "${BASH_SOURCE[0]}")/bootstrap.sh"

exec "$PYTHON" -m megaverl.cli.main quickstart "$@"
