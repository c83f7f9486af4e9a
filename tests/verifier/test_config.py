"""config.json as transformers 4 and 5 write it, family by family; whatever is not supported is refused by name."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from operator import attrgetter

import pytest
import torch

from foresay.verifier.model.config import ModelConfig, numbers_per_token
from foresay.verifier.model.errors import ConfigError, UnsupportedArchitecture
from foresay.verifier.model.families import FAMILIES
from foresay.verifier.model.layers import Attention, QKNorm, Stack
from foresay.verifier.model.mla import MLA
from foresay.verifier.model.products import NormKind
from foresay.verifier.model.rope_config import LinearScaling, Llama3Scaling, RopeConfig, YarnScaling
from tests.verifier import families

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
# The keys that matter of published config.json files, as transformers 4 wrote them.
LLAMA2_7B = {
    "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 4096, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 32, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "tie_word_embeddings": False, "torch_dtype": "float16", "vocab_size": 32000,
}  # fmt: skip
LLAMA31_8B = {
    **LLAMA2_7B, "eos_token_id": [128001, 128008, 128009], "intermediate_size": 14336,
    "max_position_embeddings": 131072, "num_key_value_heads": 8, "attention_bias": False, "mlp_bias": False,
    "rope_scaling": LLAMA3, "rope_theta": 500000.0, "torch_dtype": "bfloat16", "vocab_size": 128256,
}  # fmt: skip
MISTRAL_7B = {
    **LLAMA2_7B, "architectures": ["MistralForCausalLM"], "intermediate_size": 14336, "num_key_value_heads": 8,
    "max_position_embeddings": 32768, "rope_theta": 10000.0, "sliding_window": 4096,
}  # fmt: skip
QWEN25_05B = {
    **LLAMA2_7B, "architectures": ["Qwen2ForCausalLM"], "hidden_size": 896, "intermediate_size": 4864,
    "max_position_embeddings": 32768, "max_window_layers": 21, "num_attention_heads": 14, "num_hidden_layers": 24,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
    "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN3_06B = {
    **QWEN25_05B, "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 128,
    "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_hidden_layers": 28,
    "num_key_value_heads": 8, "sliding_window": None,
}  # fmt: skip
QWEN_WINDOW = {**QWEN25_05B, "use_sliding_window": True}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
YARN32 = {**YARN, "original_max_position_embeddings": 32768}


@pytest.fixture
def read(tmp_path):
    def read(raw, generation=None, **changes):
        (tmp_path / "config.json").write_text(json.dumps({**raw, **changes}))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return ModelConfig.from_directory(tmp_path)

    return read


def without(raw, *keys):
    return {key: value for key, value in raw.items() if key not in keys}


def windows(config: ModelConfig) -> list[int | None]:
    return [getattr(layer.mixer, "window", None) for layer in config.stack.layers]


def biases(config: ModelConfig) -> set[str]:
    return {product.name for product in config.first.products(config.hidden_size) if product.bias}


def test_llama2(read):
    assert read(LLAMA2_7B) == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=32000,
        hidden_size=4096,
        stack=Stack.uniform(32, Attention(32, 32, 128, 1 / math.sqrt(128), RopeConfig(10000.0)), 11008, NormKind(1e-5)),
        tie_word_embeddings=False,
        max_positions=4096,
        dtype="float16",
        eos_token_ids=(2,),
    )


SHOWN = {"windows": windows, "biases": biases}


@pytest.mark.parametrize(
    ("raw", "changes", "expected"),
    [
        (LLAMA31_8B, {}, {"num_kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", "biases": set(),
                          "rope": RopeConfig(500000.0, Llama3Scaling(8.0, 1.0, 4.0, 8192)),
                          "eos_token_ids": (128001, 128008, 128009)}),
        (LLAMA31_8B, {"attention_bias": True}, {"biases": {"qkv", "output"}}),
        (LLAMA31_8B, {"mlp_bias": True}, {"biases": {"gate_up", "down"}}),
        (MISTRAL_7B, {}, {"windows": [4096] * 32}),
        (MISTRAL_7B, {"sliding_window": None}, {"windows": [None] * 32}),
        (without(MISTRAL_7B, "sliding_window"), {}, {"windows": [4096] * 32}),
        (MISTRAL_7B, {"head_dim": 64}, {"head_dim": 64}),
        (QWEN25_05B, {}, {"biases": {"qkv"}, "first.attention.norm": None, "tie_word_embeddings": True,
                          "windows": [None] * 24, "max_positions": 32768}),
        (QWEN_WINDOW, {}, {"windows": [None] * 21 + [32768] * 3}),
        (QWEN_WINDOW, {"max_window_layers": 0}, {"windows": [32768] * 24}),
        (QWEN_WINDOW, {"max_window_layers": 24}, {"windows": [None] * 24}),
        (QWEN_WINDOW, {"layer_types": ["sliding_attention", "full_attention"] * 12}, {"windows": [32768, None] * 12}),
        (QWEN25_05B, {"rope_scaling": YARN32}, {"max_positions": 131072}),
        (QWEN25_05B, {"rope_scaling": YARN32, "max_position_embeddings": 131072}, {"max_positions": 131072}),
        (QWEN3_06B, {}, {"first.attention.norm": QKNorm(NormKind(1e-6)), "head_dim": 128, "biases": set()}),
        (without(QWEN3_06B, "head_dim"), {}, {"head_dim": 128}),
        (QWEN3_06B, {"attention_bias": True}, {"biases": {"qkv", "output"}}),
        # The positions next to the scaling win.
        (LLAMA2_7B, {"rope_scaling": {**YARN, "original_max_position_embeddings": 77},
                     "original_max_position_embeddings": 2048}, {"rope.parameters": YarnScaling(4.0, 2048)}),
        (without(LLAMA2_7B, "eos_token_id"), {}, {"eos_token_ids": ()}),
        (LLAMA2_7B, {"generation": {"temperature": 0.6}}, {"eos_token_ids": (2,)}),
        (LLAMA2_7B, {"generation": {"eos_token_id": 7}}, {"eos_token_ids": (7,)}),
        (LLAMA2_7B, {"generation": {"eos_token_id": [7, 0]}}, {"eos_token_ids": (7, 0)}),
        # What transformers assumes of missing keys.
        (without(LLAMA2_7B, "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "torch_dtype", "hidden_act"),
         {}, {"num_kv_heads": 32, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "dtype": "float32"}),
        (without(MISTRAL_7B, "num_key_value_heads"), {}, {"num_kv_heads": 8}),
        (MISTRAL_7B, {"num_key_value_heads": None}, {"num_kv_heads": 32}),
    ],
)  # fmt: skip
def test_what_is_read(read, raw, changes, expected):
    config = read(raw, **changes)
    assert {name: SHOWN.get(name, attrgetter(name))(config) for name in expected} == expected


@pytest.mark.parametrize(
    ("scaling", "parameters"),
    [
        ({"rope_type": "default"}, None),
        ({"type": "linear", "factor": 2.0}, LinearScaling(2.0)),
        ({"rope_type": "linear", "factor": 2.0}, LinearScaling(2.0)),
        (LLAMA3, Llama3Scaling(8.0, 1.0, 4.0, 8192)),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, YarnScaling(4.0, 1024)),
        ({"type": "yarn", "factor": 4.0, "truncate": False}, YarnScaling(4.0, 4096, truncate=False)),
    ],
)
def test_rope_in_both_spellings(read, scaling, parameters):
    expected = RopeConfig(1e6, parameters)
    assert read(LLAMA2_7B, rope_theta=1e6, rope_scaling=scaling).rope == expected
    five = without(LLAMA2_7B, "rope_scaling", "torch_dtype")
    config = read(five, rope_parameters={**scaling, "rope_theta": 1e6}, dtype="bfloat16")
    assert config.rope == expected
    assert config.dtype == "bfloat16"


def test_eos_token_ids_that_the_model_does_not_have_are_left_out(read, caplog):
    config = read(LLAMA2_7B, generation={"eos_token_id": [7, 32000, -1]})
    assert config.eos_token_ids == (7,)
    (message,) = [record.getMessage() for record in caplog.records]
    assert all(word in message for word in ("generation_config.json", "eos_token_id 32000, -1", "32000 tokens"))


@pytest.mark.parametrize("family", families.FAMILIES)
def test_what_transformers_saves_now(tmp_path, family):
    model_class = families.FAMILIES[family][1]
    theirs = families.config_of(family, architectures=[model_class.__name__], dtype=torch.float16)
    theirs.save_pretrained(tmp_path)
    ours, theirs = ModelConfig.from_directory(tmp_path), theirs.get_text_config()
    assert ours.architecture in FAMILIES
    layers = [theirs.per_layer_config[layer] if "gemma4" in family else theirs for layer in range(ours.num_layers)]
    for one, of in zip(ours.stack.attentions, layers, strict=False):
        groups = 1 if isinstance(one, MLA) else of.num_key_value_heads
        assert (one.heads, one.kv_heads) == (of.num_attention_heads, groups)
        assert one.rotary_dim == getattr(of, "head_dim", of.hidden_size // of.num_attention_heads)
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    window = getattr(theirs, "sliding_window", None)
    types = getattr(theirs, "layer_types", ["sliding_attention"] * ours.num_layers)
    assert windows(ours) == [window if kind == "sliding_attention" else None for kind in types]
    if any(ours.ropes):
        rope = theirs.rope_parameters
        stretched = rope.get("alpha", 1.0) ** (ours.head_dim / (ours.head_dim - 2))  # HunYuan
        assert ours.rope.theta == rope.get("full_attention", rope)["rope_theta"] * stretched
    ends = theirs.eos_token_id
    assert (ours.dtype, ours.eos_token_ids) == ("float16", tuple(ends) if isinstance(ends, list) else (ends,))


def test_other_architectures_are_refused_by_name(read):
    with pytest.raises(UnsupportedArchitecture) as caught:
        read(LLAMA2_7B, architectures=["GPTNeoXForCausalLM"])
    assert caught.value.architecture == "GPTNeoXForCausalLM"
    message = str(caught.value)
    assert all(name in message for name in ("GPTNeoXForCausalLM", "config.json", *FAMILIES, "SmolLM"))


COUNTS = [
    *("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "max_position_embeddings"),
]


@pytest.mark.parametrize("value", [0, -1, 10**10, 10**30, 10**400, 1.5, float("nan"), float("inf"), "4", True, [4]])
@pytest.mark.parametrize("key", COUNTS)
def test_counts_that_cannot_be_are_refused_at_once(read, key, value):
    with pytest.raises(ConfigError) as caught:
        read(LLAMA2_7B, **{key: value})
    assert key in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("value", [0, -1.0, 1e39, 10**400, float("nan"), float("inf"), "4", True, [4]])
@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta", "factor", "beta_fast", "attention_factor"])
def test_measures_that_cannot_be_are_refused_at_once(read, key, value):
    changes = {key: value} if key in ("rms_norm_eps", "rope_theta") else {"rope_scaling": {**YARN, key: value}}
    with pytest.raises(ConfigError, match=key):
        read(LLAMA2_7B, **changes)


DEEPSEEK = {
    **LLAMA2_7B,
    "n_routed_experts": 16, "num_experts_per_tok": 6, "moe_intermediate_size": 64, "kv_lora_rank": 64,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "architectures": ["DeepseekV3ForCausalLM"],
}  # fmt: skip


GEMMA4 = {
    **LLAMA2_7B,
    "architectures": ["Gemma4ForCausalLM"], "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "global_head_dim": 512, "num_global_key_value_heads": 2, "attention_k_eq_v": True, "num_hidden_layers": 12,
    "num_kv_shared_layers": 6, "use_double_wide_mlp": True, "use_bidirectional_attention": "vision",
    "hidden_size_per_layer_input": 0, "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip


GRANITE = {**LLAMA2_7B, "architectures": ["GraniteSWAForCausalLM"], "num_hidden_layers": 2}
#: By what is changed in whose configuration, what the message says.
REFUSED = [
    (LLAMA2_7B, {"architectures": None}, ["architectures"]),
    (LLAMA2_7B, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["'dynamic'", "llama3, yarn"]),
    (LLAMA2_7B, {"rope_scaling": {"rope_type": "longrope", "long_factor": [1.0]}},
     ["short_factor", "positive numbers"]),
    (LLAMA2_7B, {"rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [2]}},
     ["long_factor", "64 num"]),
    (LLAMA2_7B, {"rope_scaling": {"type": "linear"}}, ["rope_scaling", "factor is missing"]),
    (LLAMA2_7B, {"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, ["low_freq_factor"]),
    (LLAMA2_7B, {"rope_scaling": {**YARN, "factor": 1e30}}, ["factor"]),
    (LLAMA2_7B, {"rope_theta": 1.0}, ["rope_theta must be above 1"]),
    (LLAMA2_7B, {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["per layer type"]),
    (LLAMA2_7B, {"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
    (LLAMA2_7B, {"quantization_config": {"quant_method": "awq", "bits": 3}}, ["quantization_config", "awq", "3 bits"]),
    (LLAMA2_7B, {"hidden_act": "gelu"}, ["'gelu'", "silu"]),
    (LLAMA2_7B, {"hidden_size": "big"}, ["hidden_size", "'big'"]),
    (LLAMA2_7B, {"vocab_size": None}, ["vocab_size is missing"]),
    (LLAMA2_7B, {"num_hidden_layers": 10**9}, ["num_hidden_layers must be a whole number from 1 to 10000"]),
    (LLAMA2_7B, {"num_key_value_heads": 5}, ["num_attention_heads 32", "num_key_value_heads 5"]),
    (LLAMA2_7B, {"head_dim": 33}, ["head_dim 33"]),
    (LLAMA2_7B, {"rms_norm_eps": 0}, ["rms_norm_eps"]),
    (LLAMA2_7B, {"tie_word_embeddings": "no"}, ["tie_word_embeddings"]),
    (LLAMA2_7B, {"eos_token_id": "</s>"}, ["eos_token_id", "</s>"]),
    (QWEN25_05B, {"layer_types": ["full_attention"]}, ["24 layers"]),
    (QWEN25_05B, {"layer_types": ["linear_attention"] * 24}, ["'linear_attention'", "sliding_attention"]),
    (QWEN25_05B, {"layer_types": ["sliding_attention"] * 24}, ["use_sliding_window"]),
    (MISTRAL_7B, {"layer_types": ["full_attention", "sliding_attention"] * 16}, ["layer_types", "sliding_window"]),
    *((GRANITE, {"layer_rope_theta": thetas}, ["layer_rope_theta"])
      for thetas in ([-5.0, 0], [1e4], [float("nan"), 0], [True, 0], "none")),
    (DEEPSEEK, {"n_group": 3}, ["n_group 3 does not divide"]),
    (DEEPSEEK, {"n_group": 16}, ["n_group 16 leaves one expert in a group"]),
    (DEEPSEEK, {"topk_group": 2}, ["topk_group 2 of n_group 8 is not supported with 6 of 16 experts"]),
    (DEEPSEEK, {"topk_group": 9}, ["topk_group 9"]),
    (DEEPSEEK, {"topk_method": "group_limited_greedy"}, ["topk_method 'group_limited_greedy'", ": greedy, noaux_tc"]),
    (DEEPSEEK, {"scoring_func": "softmax", "topk_method": "noaux_tc"}, ["'noaux_tc'", ", group_limited_greedy"]),
    (DEEPSEEK, {"scoring_func": "softplus"}, ["scoring_func 'softplus'"]),
    (DEEPSEEK, {"scoring_func": []}, ["scoring_func"]),
    (DEEPSEEK, {"hidden_act": ["silu"]}, ["hidden_act"]),
    (DEEPSEEK, {"architectures": [[]]}, ["architectures"]),
    (GEMMA4, {"num_kv_shared_layers": 11}, ["num_kv_shared_layers leaves no layer of a kind"]),
    (GEMMA4, {"num_kv_shared_layers": 12}, ["num_kv_shared_layers must be a whole number from 0 to 11"]),
    *((GEMMA4, {"per_layer_config": layers}, ["per_layer_config may have head_dim and num_key_value_heads"])
      for layers in ({"5": {"sliding_window": 3}}, {"full_attention": {"head_dim": 3}})),
    (GEMMA4, {"per_layer_config": {"5": {"head_dim": 64}}},
     ["layer 11 has other widths than layer 5, whose keys it reads"]),
    (GEMMA4, {"use_bidirectional_attention": "all"}, ["use_bidirectional_attention"]),
    (GEMMA4, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
     ["rope_parameters must have those of full_"]),
    (GEMMA4, {"global_head_dim": 33}, ["head_dim 33 is odd"]),
    (GEMMA4, {"num_global_key_value_heads": 3}, ["not a multiple of num_key_value_heads 3"]),
]  # fmt: skip


@pytest.mark.parametrize(("raw", "changes", "words"), REFUSED)
def test_refusals_name_key_and_file(read, raw, changes, words):
    assert raw is not DEEPSEEK or read(raw).stack.experts.router.groups == (8, 4)
    with pytest.raises(ConfigError) as caught:
        read(raw, **changes)
    assert all(word in str(caught.value) for word in [*words, "config.json"])


def test_gemma_4_s_layers(read):
    """By the keys of published files, and by those that transformers writes."""
    found = read(GEMMA4)
    wide, narrow = found.stack.attentions[5], found.stack.attentions[4]
    assert (wide.heads, wide.kv_heads, wide.head_dim, wide.window, wide.values_from_keys) == (8, 2, 512, None, True)
    assert (narrow.heads, narrow.kv_heads, narrow.head_dim, narrow.window) == (8, 4, 256, 512)
    assert not narrow.values_from_keys and wide.scale == narrow.scale == 1.0
    assert [one.source for one in found.stack.attentions] == [None] * 6 + [4] * 5 + [5]
    widths = [layer.mlp.inner for layer in found.stack.layers]
    assert widths == [11008] * 6 + [22016] * 6
    written = without(GEMMA4, "global_head_dim", "num_global_key_value_heads")
    layers = {f"{layer:02}": {"head_dim": 512, "num_key_value_heads": 2} for layer in (5, 11)}
    assert read(written, per_layer_config=layers) == found
    assert numbers_per_token(found) == 5 * 2 * 4 * 256 + 2 * 2 * 512


def test_absent_or_broken_file(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read"):
        ModelConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json: not valid JSON"):
        ModelConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="expected a JSON object"):
        ModelConfig.from_directory(tmp_path)


def test_reading_a_config_imports_neither_torch_nor_transformers():
    code = "import sys, foresay.verifier.model.config; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
