#!/usr/bin/env bash
# All GPU tests, on a machine with a GPU or several: bash tests/gpu/run.sh [pytest options]. With `-n WORKERS` these are spread over all
# GPUs; the tests that need two come last, with all of them. Needs torch, triton, transformers and pytest there, and Firstlight's own
# dependencies; installs nothing.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="src:tests${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1
gpus="${CUDA_VISIBLE_DEVICES:-$(python3 -c 'import torch; print(*range(torch.cuda.device_count()), sep=",")')}"
several=tests/gpu/test_tensor_parallel.py
status=0
run() {
    local code=0
    python3 -m pytest --confcutdir=tests/gpu -p no:cacheprovider -q "$@" || code=$?
    [[ $code == 0 || $code == 5 ]] || status=$code  # 5: the options choose no test here
}

TEST_GPUS="$gpus" run tests/gpu "--ignore=$several" "$@"
if [[ "$gpus" == *,* ]]; then
    run "$several" "$@"
fi
exit "$status"
