#!/usr/bin/env bash
# What docs/performance.md says of a GPU, measured again: bash benchmarks/gpu_all.sh FOLDER [STEP ...]
#
# Runs the steps named, or all in this order, one after another, each with a limit of seconds; what each prints and its JSON go to
# FOLDER. A step that fails or is cut doesn't stop the others; the exit status is then 1. Everything together should take some forty minutes on
# one H200 with compiled kernels (TRITON_CACHE_DIR says where they are kept); not run in one go yet.
set -uo pipefail
folder=$(mkdir -p "${1:?say where results go}" && cd "$1" && pwd)
shift
cd "$(dirname "$0")/.."
export PYTHONPATH="src:tests${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
model=tests/configs/Qwen3.5-35B-A3B-FP8.json
served=("$model" --weights random --server-option=--device=cuda)

declare -A limit=([tests]=600 [verify]=300 [answers]=240 [decode]=240 [paths]=700 [kernels]=300 [pool]=60 [calibrate]=360 [closed]=900 [long]=180 [soak]=420)
order=(tests verify answers decode paths kernels pool calibrate closed long soak)

command_of() {
    case $1 in
        tests) echo bash tests/gpu/run.sh -n 16 ;;
        verify | answers) echo python3 benchmarks/gpu_checks.py "$1" --json "$folder/$1.json" ;;
        decode) echo python3 benchmarks/h200.py $model --prompts 8192 2048 512 --json "$folder/$1.json" ;;
        paths) echo python3 benchmarks/paths.py $model --limit 680 --json "$folder/$1.json" ;;
        kernels) echo python3 benchmarks/kernels_all.py --kernels --json "$folder/$1.json" ;;
        pool) echo python3 benchmarks/pool_layout.py ;;
        calibrate) echo python3 -m firstlight calibrate $model --weights random --device cuda --max-running 256 --step-tokens 8192 --max-context 40960 --out "$folder/$1.json" ;;
        closed) echo python3 benchmarks/served.py "${served[@]}" --json "$folder/$1.json" ;;
        long) echo python3 benchmarks/served.py "${served[@]}" --parts long --json "$folder/$1.json" ;;
        soak) echo python3 benchmarks/soak.py "${served[@]}" --seconds 300 --at-once 100 --json "$folder/$1.json" ;;
        *) echo "no step $1; there are ${order[*]}" >&2 && return 1 ;;
    esac
}

steps=("$@")
((${#steps[@]})) || steps=("${order[@]}")
status=0
for step in "${steps[@]}"; do
    command=$(command_of "$step") || exit 2
    began=$SECONDS
    timeout --kill-after=10 "${limit[$step]}" $command >"$folder/$step.txt" 2>&1
    code=$?
    [[ $code == 0 ]] || status=1
    echo "$step: exit status $code after $((SECONDS - began)) s"
done
exit $status
