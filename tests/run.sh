#!/usr/bin/env bash
# Runs the whole test suite on a fresh clone; arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/bootstrap.sh dev

# Spinning OpenMP threads of several processes slow each other down by a factor of ten.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Every test runs without a network: a model that is missing is a failure, not a download.
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# Each file stays in one process, so that what it starts is started once.
exec .venv/bin/python -m pytest -n "${TEST_PROCESSES:-2}" --dist loadfile "$@"
