"""Reading published checkpoints: safetensors and GGUF, tokenizers and chat templates; filling a model with weights."""
