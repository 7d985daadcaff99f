#!/usr/bin/env bash
# Starts the whole service; the first start makes .venv.
#
#   bash start_all.sh [--http] [--public] [--no-auth] [--detach] [--port N] [--config FILE]
#                     [--lang zh|en] [--static-dir DIR]
#   bash start_all.sh stop | status | restart
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

case ${1:-} in
  # What runs already is not to wait for, or fail with, an installation.
  stop | status | restart)
    [ -x .venv/bin/python ] || { echo "not running (there is no .venv)"; exit 0; } ;;
  *) bash scripts/bootstrap.sh ;;
esac
exec .venv/bin/python -m scripts.launch "$@"
