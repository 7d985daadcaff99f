#!/usr/bin/env bash
# Runs the whole test suite on a fresh clone; with arguments, what they ask pytest for.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/bootstrap.sh dev

# Spinning OpenMP threads of several processes slow each other down by a factor of ten.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Every test runs without a network: a model that is missing is a failure, not a download.
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
pytest() { .venv/bin/python -m pytest "$@"; }
if [ $# -gt 0 ]; then
  pytest "$@"
  exit
fi
# Each file stays in one process, so that what it starts is started once.
status=0
pytest -n 2 --dist loadfile -m "not realtime" || status=$?
pytest -m realtime || status=$?
exit "$status"
