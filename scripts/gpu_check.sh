#!/usr/bin/env bash
# Everything that a GPU has to say about clozelab, in one command and within minutes: docs/gpu.md.
#
#   scripts/gpu_check.sh                              on a machine with a GPU (torch and Python 3.11 or newer)
#   scripts/gpu_check.sh --size smoke --device cpu    the same steps, tiny, anywhere
#   scripts/gpu_check.sh --wheels                     where there is internet: what a bare machine lacks, into .whl/
#   scripts/gpu_check.sh --help                       every option
#
# PYTHON names the interpreter (default: python3 of the active environment).
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-python3}"
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "gpu_check: $python is no Python 3.11 or newer; set PYTHON to one that has torch" >&2
    exit 2
fi
export PYTHONPATH="$root/scripts${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m gpu_check "$@"
