"""GGUF files as checkpoints: configuration, names, values and packed blocks, against transformers and the gguf package."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import MODEL_ARCH, GGUFReader, get_tensor_name_map, quants
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from weights.samples import LLAMA, llama_tensors, permuted, vocabulary, write_gguf, write_llama

from firstlight.errors import CheckpointError
from firstlight.quant.gguf_blocks import GGML_TYPES, dequantize
from firstlight.weights.gguf_config import llama3_factors
from firstlight.weights.gguf_names import BLOCK_NAMES, EXPERTS, TOP_NAMES
from firstlight.weights.gguf_reader import read_gguf

QWEN3 = {key: value for key, value in LLAMA.items() if key != "rope.dimension_count"} | {
    "attention.key_length": 32,
    "attention.value_length": 32,
}
QWEN3_MOE = QWEN3 | {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}


def qwen3_tensors(experts: int = 0) -> dict[str, tuple[np.ndarray, str]]:
    random = np.random.default_rng(3)
    shapes = {"token_embd": (len(vocabulary()[0]), 64), "output": (len(vocabulary()[0]), 64), "output_norm": (64,)}
    for layer in range(2):
        block = {"attn_norm": (64,), "ffn_norm": (64,), "attn_q_norm": (32,), "attn_k_norm": (32,)}
        block |= {"attn_q": (128, 64), "attn_k": (64, 64), "attn_v": (64, 64), "attn_output": (64, 128)}
        if experts:
            block |= {"ffn_gate_inp": (experts, 64), "ffn_gate_exps": (experts, 32, 64)}
            block |= {"ffn_up_exps": (experts, 32, 64), "ffn_down_exps": (experts, 64, 32)}
        else:
            block |= {"ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    return {
        f"{name}.weight": (
            random.standard_normal(shape).astype(np.float32),
            "F32" if len(shape) == 1 or name.endswith("inp") else "Q4_0",
        )
        for name, shape in shapes.items()
    }


def tensors_in_transformers(path, config) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]


@pytest.mark.parametrize("weight_type", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16", "F32"])
def test_llama_equals_transformers(tmp_path, weight_type):
    published = write_llama(tmp_path / "m.gguf", weight_type)
    config, tensors, _ = read_gguf(tmp_path / "m.gguf")
    expected = tensors_in_transformers(tmp_path / "m.gguf", LlamaConfig(**config))
    assert tensors.keys() == published.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert tensor.load().float().equal(expected[name]), name
        assert tensor.shape == published[name].shape
    if weight_type == "F32":
        assert all(tensors[name].load().equal(torch.from_numpy(values)) for name, values in published.items())


@pytest.mark.parametrize("name", ["self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"])
@pytest.mark.parametrize("weight_type", ["Q4_1", "Q8_0", "BF16"])
def test_packed_rows_are_in_the_published_order_too(tmp_path, name, weight_type):
    write_llama(tmp_path / "m.gguf", weight_type)
    tensor = read_gguf(tmp_path / "m.gguf")[1][f"model.layers.1.{name}.weight"]
    packed = tensor.load_packed()
    assert packed.dtype == torch.uint8
    assert dequantize(packed, weight_type).equal(tensor.load().float())
    block = GGML_TYPES[weight_type].weights
    some = [(5, 21), (block, 2 * block)]
    assert dequantize(tensor.load_packed(some), weight_type).equal(tensor.load_slice(some).float())


@pytest.mark.parametrize("ranges", [[(0, 0)], [(3, 9), (1, 33)], [None, (31, 32)], [(63, 64)], [(0, 64), (40, 40)]])
@pytest.mark.parametrize("name", ["self_attn.q_proj", "self_attn.o_proj"])
def test_slices_of_blocks(tmp_path, name, ranges):
    write_llama(tmp_path / "m.gguf", "Q5_1")
    tensor = read_gguf(tmp_path / "m.gguf")[1][f"model.layers.0.{name}.weight"]
    index = tuple(slice(None) if part is None else slice(*part) for part in ranges)
    assert tensor.load_slice(ranges).equal(tensor.load()[index])


def test_errors_of_packed_slices(tmp_path):
    write_llama(tmp_path / "m.gguf", "Q8_0")
    tensors = read_gguf(tmp_path / "m.gguf")[1]
    tensor = tensors["model.layers.0.self_attn.o_proj.weight"]
    with pytest.raises(ValueError, match=r"o_proj.*columns 0:33 cut through Q8_0 blocks of 32"):
        tensor.load_packed([None, (0, 33)])
    with pytest.raises(IndexError, match=r"o_proj.*\[64, 64\]"):
        tensor.load_packed([(0, 65)])
    assert not tensors["model.norm.weight"].can_stay_packed
    with pytest.raises(ValueError, match="use load_slice"):
        tensors["model.norm.weight"].load_packed()


def test_llama_configuration(tmp_path):
    write_llama(tmp_path / "m.gguf")
    config = read_gguf(tmp_path / "m.gguf")[0]
    expected = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "max_position_embeddings": 512,
        "vocab_size": len(vocabulary()[0]),
        "tie_word_embeddings": True,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    assert {key: config[key] for key in expected} == expected
    in_transformers = load_gguf_checkpoint(tmp_path / "m.gguf")["config"]
    for key in set(expected) & set(in_transformers):
        assert config[key] == pytest.approx(in_transformers[key]), key


def test_biases_are_permuted_as_weights_are(tmp_path):
    _, stored = llama_tensors()
    biases = {
        name: np.random.default_rng(5).standard_normal(size).astype(np.float32) for name, size in (("q", 64), ("k", 32))
    }
    for layer in range(2):
        stored[f"blk.{layer}.attn_q.bias"] = (permuted(biases["q"], 4), "F32")
        stored[f"blk.{layer}.attn_k.bias"] = (permuted(biases["k"], 2), "F32")
    write_gguf(tmp_path / "m.gguf", "llama", LLAMA, stored, "smollm")
    config, tensors, _ = read_gguf(tmp_path / "m.gguf")
    assert config["attention_bias"]
    for name, values in biases.items():
        tensor = tensors[f"model.layers.1.self_attn.{name}_proj.bias"]
        assert tensor.load().equal(torch.from_numpy(values))
        assert tensor.load_slice([(3, 20)]).equal(torch.from_numpy(values[3:20]))


def test_qwen3_equals_transformers(tmp_path):
    write_gguf(tmp_path / "m.gguf", "qwen3", QWEN3, qwen3_tensors(), "qwen2", eos=2)
    config, tensors, _ = read_gguf(tmp_path / "m.gguf")
    assert (config["model_type"], config["head_dim"], config["tie_word_embeddings"]) == ("qwen3", 32, False)
    expected = tensors_in_transformers(tmp_path / "m.gguf", Qwen3Config(**config))
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert tensor.load().equal(expected[name]), name


def test_qwen3_moe_equals_transformers(tmp_path):
    write_gguf(tmp_path / "m.gguf", "qwen3moe", QWEN3_MOE, qwen3_tensors(experts=4), "qwen2", eos=2)
    config, tensors, _ = read_gguf(tmp_path / "m.gguf")
    assert (config["num_experts"], config["num_experts_per_tok"], config["moe_intermediate_size"]) == (4, 2, 32)
    assert config["norm_topk_prob"]
    expected = tensors_in_transformers(tmp_path / "m.gguf", Qwen3MoeConfig(**config))
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts."
        fused = expected.pop(f"{prefix}gate_up_proj"), expected.pop(f"{prefix}down_proj")
        for expert in range(4):
            expected[f"{prefix}{expert}.gate_proj.weight"] = fused[0][expert, :32]
            expected[f"{prefix}{expert}.up_proj.weight"] = fused[0][expert, 32:]
            expected[f"{prefix}{expert}.down_proj.weight"] = fused[1][expert]
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert tensor.load().equal(expected[name]), name
        if ".experts." in name:
            assert dequantize(tensor.load_packed(), "Q4_0").equal(expected[name]), name


def test_k_blocks_are_read_as_the_gguf_package_reads_them(tmp_path):
    random = np.random.default_rng(1)
    stored = {f"blk.0.{name}.weight": ggml_type for name, ggml_type in (("attn_v", "Q4_K"), ("attn_output", "Q6_K"))}
    from gguf import GGMLQuantizationType, GGUFWriter

    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    for key, value in LLAMA.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"llama.{key}", value)
    writer.add_uint32("llama.vocab_size", 8)
    raw = {}
    for name, ggml_type in stored.items():
        raw[name] = random.integers(0, 60, (4, 2 * GGML_TYPES[ggml_type].bytes), dtype=np.uint8)
        writer.add_tensor(name, raw[name], raw_dtype=GGMLQuantizationType[ggml_type])
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    tensors = read_gguf(tmp_path / "m.gguf")[1]
    for name, ggml_type in stored.items():
        published = "model.layers.0.self_attn." + ("v_proj.weight" if "attn_v" in name else "o_proj.weight")
        expected = quants.dequantize(raw[name], GGMLQuantizationType[ggml_type])
        assert tensors[published].shape == (4, 512)
        assert tensors[published].load().equal(torch.from_numpy(expected))
        assert tensors[published].load_slice([(1, 3), (250, 300)]).equal(torch.from_numpy(expected[1:3, 250:300]))
        assert GGUFReader(tmp_path / "m.gguf").tensors[list(stored).index(name)].n_bytes == tensors[published].nbytes


QWEN3_5 = {
    "block_count": 5,  # one of them predicts further tokens
    "nextn_predict_layers": 1,
    "context_length": 512,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 2,
    "attention.head_count_kv": 1,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 10000000.0,
    "rope.dimension_count": 8,
    "rope.dimension_sections": [2, 1, 1, 0],
    "full_attention_interval": 4,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 6,
    "ssm.inner_size": 6 * 16,
}


def tiled(values: np.ndarray, head_dim: int, axis: int = 0, start: int = 0) -> np.ndarray:
    """Value heads of 2 key heads with 3 value heads each, from the published order to a qwen35 file's."""
    moved = np.moveaxis(values, axis, 0)
    heads = moved[start:].reshape(2, 3, head_dim, *moved.shape[1:])
    both = np.concatenate((moved[:start], heads.swapaxes(0, 1).reshape(moved[start:].shape)))
    return np.ascontiguousarray(np.moveaxis(both, 0, axis))


def test_qwen3_5_rearrangements_are_undone(tmp_path):
    random = np.random.default_rng(7)

    def values(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float32)

    linear = {
        "input_layernorm.weight": values(64),
        "post_attention_layernorm.weight": values(64),
        "linear_attn.in_proj_qkv.weight": values(64 + 96, 64),
        "linear_attn.in_proj_z.weight": values(96, 64),
        "linear_attn.in_proj_a.weight": values(6, 64),
        "linear_attn.in_proj_b.weight": values(6, 64),
        "linear_attn.conv1d.weight": values(64 + 96, 1, 4),
        "linear_attn.dt_bias": values(6),
        "linear_attn.A_log": values(6),
        "linear_attn.norm.weight": values(16),
        "linear_attn.out_proj.weight": values(64, 96),
    }
    full = {"self_attn.q_norm.weight": values(32), "self_attn.k_norm.weight": values(32)}
    stored = {
        "token_embd.weight": values(len(vocabulary()[0]), 64),
        "output_norm.weight": values(64),
        "blk.0.attn_norm.weight": linear["input_layernorm.weight"] + 1,
        "blk.0.post_attention_norm.weight": linear["post_attention_layernorm.weight"] + 1,
        "blk.0.attn_qkv.weight": tiled(linear["linear_attn.in_proj_qkv.weight"], 16, start=64),
        "blk.0.attn_gate.weight": tiled(linear["linear_attn.in_proj_z.weight"], 16),
        "blk.0.ssm_alpha.weight": tiled(linear["linear_attn.in_proj_a.weight"], 1),
        "blk.0.ssm_beta.weight": tiled(linear["linear_attn.in_proj_b.weight"], 1),
        "blk.0.ssm_conv1d.weight": tiled(linear["linear_attn.conv1d.weight"], 16, start=64).squeeze(1),
        "blk.0.ssm_dt.bias": tiled(linear["linear_attn.dt_bias"], 1),
        "blk.0.ssm_a": -np.exp(tiled(linear["linear_attn.A_log"], 1)),
        "blk.0.ssm_norm.weight": linear["linear_attn.norm.weight"],
        "blk.0.ssm_out.weight": tiled(linear["linear_attn.out_proj.weight"], 16, axis=1),
        "blk.3.attn_q_norm.weight": full["self_attn.q_norm.weight"] + 1,
        "blk.3.attn_k_norm.weight": full["self_attn.k_norm.weight"] + 1,
        "blk.4.nextn.eh_proj.weight": values(64, 128),
    }
    types = {"blk.0.attn_gate.weight": "Q8_0", "blk.0.ssm_out.weight": "Q8_0"}
    write_gguf(
        tmp_path / "m.gguf",
        "qwen35",
        QWEN3_5,
        {name: (array, types.get(name, "F32")) for name, array in stored.items() if "nextn" not in name}
        | {"blk.4.attn_norm.weight": (values(64), "F32")},
        "qwen35",
    )
    config, tensors, _ = read_gguf(tmp_path / "m.gguf")
    assert config["model_type"] == "qwen3_5_text"
    assert (config["num_hidden_layers"], config["layer_types"]) == (4, ["linear_attention"] * 3 + ["full_attention"])
    assert config["rope_parameters"]["partial_rotary_factor"] == 0.25
    assert config["rope_parameters"]["mrope_section"] == [2, 1, 1]
    assert (config["linear_num_key_heads"], config["linear_num_value_heads"]) == (2, 6)
    assert (config["linear_key_head_dim"], config["linear_value_head_dim"]) == (16, 16)
    expected = {f"model.layers.0.{name}": array for name, array in linear.items()}
    expected |= {f"model.layers.3.{name}": array for name, array in full.items()}
    assert tensors.keys() == expected.keys() | {"model.embed_tokens.weight", "model.norm.weight"}
    for name, array in expected.items():
        loaded = tensors[name].load()
        assert loaded.shape == array.shape, name
        packed = name.endswith(("in_proj_z.weight", "out_proj.weight"))
        torch.testing.assert_close(loaded, torch.from_numpy(array), atol=0.03 if packed else 2e-6, rtol=0, msg=name)
        if array.ndim > 1:
            part = [(1, 5)] + [None] * (array.ndim - 2) + [(1, 3)]
            assert tensors[name].load_slice(part).equal(loaded[1:5, ..., 1:3]), name
    gate = tensors["model.layers.0.linear_attn.in_proj_z.weight"]
    assert dequantize(gate.load_packed(), "Q8_0").equal(gate.load())
    assert not tensors["model.layers.0.linear_attn.out_proj.weight"].can_stay_packed


@pytest.mark.parametrize(
    ("architecture", "model"),
    [(name, MODEL_ARCH[name.upper()]) for name in BLOCK_NAMES],
)
def test_names_are_those_of_the_gguf_package(architecture, model):
    names = get_tensor_name_map(model, 1)
    for gguf_name, published in TOP_NAMES.items():
        assert names.get_name(published) == gguf_name
    for gguf_name, published in BLOCK_NAMES[architecture].items():
        assert names.get_name(f"model.layers.0.{published}") == f"blk.0.{gguf_name}", published
    if architecture.endswith("moe"):
        for gguf_name, published in EXPERTS.items():
            assert names.get_name(f"model.layers.0.mlp.experts.{published}") == f"blk.0.{gguf_name}"


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_rope_scaling_is_recognised(tmp_path, factor):
    _, stored = llama_tensors()
    stored["rope_freqs.weight"] = (llama3_factors(100000.0, 16, factor).astype(np.float32), "F32")
    write_gguf(tmp_path / "m.gguf", "llama", LLAMA, stored, "llama-bpe")
    config, tensors, _ = read_gguf(tmp_path / "m.gguf")
    scaling = config["rope_scaling"]
    assert scaling["rope_type"] == "llama3"
    assert scaling["factor"] == factor
    assert scaling["original_max_position_embeddings"] == 8192
    assert "rope_freqs.weight" not in tensors
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    with_scaling, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**config), "cpu")
    plain = 1 / 100000.0 ** (torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(
        plain / with_scaling, torch.from_numpy(stored["rope_freqs.weight"][0]), rtol=1e-5, atol=0
    )


def test_other_rotary_factors_are_refused(tmp_path):
    _, stored = llama_tensors()
    stored["rope_freqs.weight"] = (np.linspace(1, 8, 8, dtype=np.float32), "F32")
    write_gguf(tmp_path / "m.gguf", "llama", LLAMA, stored, "llama-bpe")
    with pytest.raises(CheckpointError, match=r"m\.gguf: the rotary factors in rope_freqs\.weight are not those"):
        read_gguf(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"rope.scaling.type": "none"}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32768},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        ),
    ],
)
def test_declared_rope_scaling(tmp_path, more, expected):
    write_gguf(tmp_path / "m.gguf", "qwen3", QWEN3 | more, {}, "qwen2")
    assert read_gguf(tmp_path / "m.gguf")[0]["rope_scaling"] == expected


WRONG_METADATA = {
    "missing": ({"block_count": None}, r"llama\.block_count is missing"),
    "zero": ({"attention.head_count": 0}, r"llama\.attention\.head_count: 0 is not a positive integer"),
    "giant": ({"block_count": 2**31 - 1}, r"llama\.block_count: 2147483647 is not a positive integer up to 4096"),
    "kind": ({"block_count": "many"}, "'many' is not a positive integer"),
    "eps": ({"attention.layer_norm_rms_epsilon": float("nan")}, "nan is not a positive number"),
    "scaling": ({"rope.scaling.type": "longrope"}, "'longrope' is not supported; supported: none, linear, yarn"),
}


@pytest.mark.parametrize("case", WRONG_METADATA)
def test_wrong_metadata(tmp_path, case):
    change, message = WRONG_METADATA[case]
    metadata = {key: value for key, value in (LLAMA | change).items() if value is not None}
    write_gguf(tmp_path / "m.gguf", "llama", metadata, {}, "smollm")
    with pytest.raises(CheckpointError, match=message) as raised:
        read_gguf(tmp_path / "m.gguf")
    assert "m.gguf" in str(raised.value)


def test_other_architectures_are_refused(tmp_path):
    write_gguf(tmp_path / "m.gguf", "gemma2", {}, {})
    with pytest.raises(
        CheckpointError, match=r"architecture 'gemma2' is not supported; supported: llama, qwen3, qwen3moe"
    ):
        read_gguf(tmp_path / "m.gguf")


def test_unknown_tensors_and_types_are_refused(tmp_path):
    square = np.zeros((32, 32), np.float32)
    for name in ("blk.0.attn_z.weight", "extra.weight", "blk.0.attn_norm", "blk.0.ffn_gate_exps.weight"):
        write_gguf(tmp_path / "m.gguf", "llama", LLAMA, {name: (square, "F32")}, "smollm")
        with pytest.raises(CheckpointError, match=rf"tensor '{name}' is not known in a GGUF file of llama"):
            read_gguf(tmp_path / "m.gguf")
    write_gguf(tmp_path / "m.gguf", "llama", LLAMA, {"blk.0.attn_v.weight": (square, "MXFP4")}, "smollm")
    with pytest.raises(CheckpointError, match=r"'blk\.0\.attn_v\.weight' is of type MXFP4, .* supported: F32"):
        read_gguf(tmp_path / "m.gguf")


def test_a_stack_of_too_few_experts_is_refused(tmp_path):
    stored = {"blk.0.ffn_up_exps.weight": (np.zeros((3, 32, 64), np.float32), "F32")}
    write_gguf(tmp_path / "m.gguf", "qwen3moe", QWEN3_MOE, stored, "qwen2")
    with pytest.raises(CheckpointError, match=r"shape \[3, 32, 64\] should hold 4 experts"):
        read_gguf(tmp_path / "m.gguf")


def test_parts_of_a_split_file_are_refused(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "llama", LLAMA, {}, "smollm")
    content = path.read_bytes()
    key = b"split.count"
    entry = len(key).to_bytes(8, "little") + key + (2).to_bytes(4, "little") + (3).to_bytes(2, "little")
    count = int.from_bytes(content[16:24], "little") + 1
    path.write_bytes(content[:16] + count.to_bytes(8, "little") + entry + content[24:])
    with pytest.raises(CheckpointError, match="one of 3 parts; merge them first"):
        read_gguf(path)
