"""Loading takes no more memory than the model and its largest tensor."""

from __future__ import annotations

import json
import subprocess
import sys

import torch
from safetensors.torch import save_file

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 1024, "intermediate_size": 4096,
    "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": False, "max_position_embeddings": 2048,
    "dtype": "bfloat16",
}  # fmt: skip

MEASURE = """
import sys, threading, time
from firstlight.config import EngineOptions
from firstlight.engine import loading
from firstlight.nn.module import Module
from firstlight.quant import nbytes

def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024

bound = loading.bind_only(EngineOptions(model=sys.argv[1], device="cpu"))
peak, done = 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.0005)
before = anonymous()
watcher = threading.Thread(target=watch)
watcher.start()
loading.load_weights(bound.model, bound.stored, bound.device, bound.layouts)
done = True
watcher.join()
sizes = [nbytes(getattr(m, a)) for m in bound.model.modules() if isinstance(m, Module) for a in m.weight_specs]
print(peak - before, sum(sizes), max(sizes))
"""


def test_peak_anonymous_memory_is_the_model_and_its_largest_tensor(tmp_path):
    generator = torch.Generator().manual_seed(0)
    hidden, inter, vocab = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"]

    def weight(*shape):
        return torch.randn(shape, generator=generator).bfloat16()

    tensors = {"model.embed_tokens.weight": weight(vocab, hidden), "lm_head.weight": weight(vocab, hidden)}
    tensors["model.norm.weight"] = weight(hidden)
    for i in range(CONFIG["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for name, shape in {
            "self_attn.q_proj": (1024, hidden), "self_attn.k_proj": (256, hidden), "self_attn.v_proj": (256, hidden),
            "self_attn.o_proj": (hidden, 1024), "mlp.gate_proj": (inter, hidden), "mlp.up_proj": (inter, hidden),
            "mlp.down_proj": (hidden, inter), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        }.items():  # fmt: skip
            tensors[f"{layer}.{name}.weight"] = weight(*shape)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    ran = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, check=True, timeout=200
    )
    peak, model, largest = map(int, ran.stdout.split())
    print(f"peak {peak / 2**20:.1f} MiB, model {model / 2**20:.1f} MiB, largest weight {largest / 2**20:.1f} MiB")
    assert model > 140 << 20
    assert peak <= model + largest + (8 << 20)  # 8 MiB: Python objects, thread stacks
