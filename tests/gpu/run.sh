#!/usr/bin/env bash
# All GPU tests, on a machine with a GPU: bash tests/gpu/run.sh [pytest options]. Needs torch, triton, transformers and pytest
# there, and Firstlight's own dependencies; installs nothing.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="src:tests${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1
exec python3 -m pytest tests/gpu --confcutdir=tests/gpu -p no:cacheprovider -q "$@"
