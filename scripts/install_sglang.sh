#!/bin/bash
# An environment with SGLang on the CPU, for `make test-hosts`: 3 GB, about two minutes.
# Usage: bash scripts/install_sglang.sh [FOLDER], by default ~/.cache/firstlight-sglang. Needs Python 3.11 or newer.
#
# SGLang publishes no CPU build. It starts on a CPU through its own entry point for platforms, which
# tests/hosts/sglang_cpu_platform fills; kernels and packages that only a GPU needs are left out (--no-deps).
set -euo pipefail
folder=${1:-$HOME/.cache/firstlight-sglang}
if [ -e "$folder/complete" ]; then
    echo "$folder is there already"
    exit 0
fi
rm -rf "$folder"
"${PYTHON:-python3}" -m venv "$folder"
pip() { "$folder/bin/python" -m pip --disable-pip-version-check "$@"; }
# The newest numpy that Triton 3.6 works with.
pip install --quiet torch==2.13.0 numpy==2.3.5
pip install --quiet --no-deps sglang==0.5.17 torchvision==0.28.0 triton==3.6.0 apache-tvm-ffi==0.1.11 xgrammar==0.2.1 \
    transformers==5.12.1 compressed-tensors==0.20.1 kernels==0.14.1 kernels-data==0.16.2 mistral_common==1.13.1 \
    datasets==5.2.0 ipython==9.18.1 soundfile==0.13.1 gguf==0.19.0
pip install --quiet tokenizers==0.22.2 'huggingface_hub<2' safetensors regex pyyaml requests tqdm packaging pillow \
    aiohttp fastapi uvicorn uvloop starlette python-multipart orjson msgspec pyzmq psutil setproctitle sentencepiece \
    tiktoken openai==2.6.1 partial_json_parser pybase64 einops distro pydantic pydantic-extra-types jsonschema loguru \
    pycountry watchfiles zstandard scipy traitlets pygments dill multiprocess pandas pyarrow cffi opentelemetry-api \
    prometheus_client llguidance interegular cloudpickle attrs setuptools jinja2 typer rich numpy==2.3.5
# PyPI's torchvision is built for CUDA: declare the two operators that it expects to have.
packages=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cat >> "$packages/torchvision/extension.py" <<'PYTHON'

if not _has_ops():
    _declared = torch.library.Library("torchvision", "FRAGMENT")
    _declared.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
PYTHON
touch "$folder/complete"
