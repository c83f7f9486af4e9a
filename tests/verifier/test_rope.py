"""Rotary frequencies against transformers' own, to the last digit or two, and against values computed by hand."""

from __future__ import annotations

import json
import math

import pytest
import torch
from transformers import Gemma4TextConfig, LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense import HunYuanDenseV1RMSNorm
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.rope import RopeTable, inverse_frequencies
from foresay.verifier.model.rope_config import ProportionalScaling, QueryScaling, YarnScaling
from foresay.verifier.ops.attention import rotate_and_store
from foresay.verifier.ops.eager import references
from foresay.verifier.ops.records import QKNorms, Rotation

#: Two units of the last digit of fp32: torch's power is not always the nearest number, and products double it.
ULP = 2.0**-22
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": LLAMA3,
    "llama3.2": {**LLAMA3, "factor": 32.0},
    "yarn": YARN,
    "yarn, betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn, fractional": {**YARN, "truncate": False},
    "yarn, attention factor": {**YARN, "attention_factor": 0.75},
    "yarn, mscale": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.5},
    "yarn, no mscale": {**YARN, "mscale": 0, "mscale_all_dim": 0.5},
    "yarn, no mscale of all dimensions": {**YARN, "mscale": 0.707, "mscale_all_dim": 0},
    "yarn, neither mscale": {**YARN, "mscale": 0.0, "mscale_all_dim": 0.0, "truncate": False},
    "yarn, one mscale": {**YARN, "mscale": 0.707},
    "yarn, mscale and attention factor": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.5, "attention_factor": 0.75},
    "yarn, small factor": {**YARN, "factor": 0.5, "mscale": 0.7, "mscale_all_dim": 0.5},
    "yarn, short": {**YARN, "original_max_position_embeddings": 16},
}


@pytest.mark.parametrize("more", [{}, {"factor": 8.0}, {"partial_rotary_factor": 1.0}, {"partial_rotary_factor": 0.3}])
def test_proportional_frequencies_equal_transformers(tmp_path, more):
    """Of Gemma 4's full layers: those of all pairs of a wide head for the first, zeros for the others."""
    full = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25, **more}
    ropes = {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    theirs = Gemma4TextConfig(rope_parameters=ropes, architectures=["Gemma4ForCausalLM"])
    theirs.save_pretrained(tmp_path)
    ours = ModelConfig.from_directory(tmp_path)
    expected, _ = ROPE_INIT_FUNCTIONS["proportional"](theirs, layer_type="full_attention")
    table = RopeTable(ours.rope, 512, 100)
    assert isinstance(ours.rope.parameters, ProportionalScaling)
    assert {one.rotary_dim for one in ours.stack.attentions} == {256, 512}
    angles = torch.outer(torch.arange(100.0), expected)
    torch.testing.assert_close(table.cos, angles.cos().repeat(1, 2), rtol=0, atol=1e-5)
    torch.testing.assert_close(table.signed_sin, torch.cat((-angles.sin(), angles.sin()), dim=1), rtol=0, atol=1e-5)


def _config(directory, scaling, theta=5e5, head_dim=128):
    """The same rotary embedding as transformers' configuration and, through its config.json, as ours."""
    theirs = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters={**scaling, "rope_theta": theta},
        architectures=["LlamaForCausalLM"],
    )
    theirs.save_pretrained(directory)
    return theirs, ModelConfig.from_directory(directory)


@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_equal_transformers(tmp_path, name, head_dim, theta):
    theirs, ours = _config(tmp_path, SCALINGS[name], theta, head_dim)
    kind = theirs.rope_parameters["rope_type"]
    compute = ROPE_INIT_FUNCTIONS.get(kind, LlamaRotaryEmbedding.compute_default_rope_parameters)
    expected, expected_factor = compute(theirs)
    frequencies, factor = inverse_frequencies(ours.rope, ours.head_dim, ours.max_positions)
    assert (ours.rope.parameters is None) == (kind == "default")
    assert frequencies.dtype == torch.float32
    torch.testing.assert_close(frequencies, expected, rtol=ULP, atol=0)
    assert factor == pytest.approx(expected_factor, rel=1e-15)


@pytest.mark.parametrize("name", ["default", "llama3", "yarn"])
def test_table_equals_transformers(tmp_path, name):
    theirs, ours = _config(tmp_path, SCALINGS[name])
    positions = torch.tensor([0, 1, 17, 4095, 40_000])
    cos, sin = LlamaRotaryEmbedding(theirs)(torch.zeros(1), positions[None])
    table = RopeTable(ours.rope, ours.head_dim, 40_001)
    torch.testing.assert_close(table.cos[positions], cos[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(table.signed_sin[positions, 64:], sin[0, :, 64:], rtol=0, atol=1e-6)
    torch.testing.assert_close(table.signed_sin[positions, :64], -sin[0, :, :64], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("longest", "factors"), [(4096, "short_factor"), (4097, "long_factor")])
def test_longrope_takes_one_list_of_factors_for_good(tmp_path, longest, factors):
    lists = {"short_factor": [1.0 + n / 64 for n in range(48)], "long_factor": [1.0 + n for n in range(48)]}
    scaling = {"rope_type": "longrope", **lists, "original_max_position_embeddings": 4096}
    theirs = Phi3Config(
        num_attention_heads=4,
        hidden_size=512,
        max_position_embeddings=131072,
        pad_token_id=0,
        rope_parameters={**scaling, "partial_rotary_factor": 0.75, "rope_theta": 1e4},
        architectures=["Phi3ForCausalLM"],
    )
    theirs.save_pretrained(tmp_path)
    expected, expected_factor = ROPE_INIT_FUNCTIONS["longrope"](theirs, seq_len=longest)
    frequencies, factor = inverse_frequencies(ModelConfig.from_directory(tmp_path).rope, 128, longest)
    torch.testing.assert_close(frequencies, expected, rtol=ULP, atol=0)
    own = 1.0 / (torch.tensor(lists[factors]) * 1e4 ** (torch.arange(0, 96, 2) / 96))
    torch.testing.assert_close(frequencies, own, rtol=ULP, atol=0)
    assert factor == pytest.approx(expected_factor)


def test_rows_are_the_table_at_positions(tmp_path):
    table = RopeTable(_config(tmp_path, SCALINGS["yarn"])[1].rope, 128, 64, dtype=torch.bfloat16)
    cos, signed_sin, factor = table.rows(torch.tensor([5, 5, 63]))
    assert cos.shape == signed_sin.shape == (3, 1, 128)
    assert torch.equal(cos[2, 0], table.cos[63])
    assert torch.equal(signed_sin[0, 0], table.signed_sin[5])
    assert factor is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_query_factors_equal_transformers(tmp_path, dtype):
    table = RopeTable(
        _config(tmp_path, SCALINGS["yarn"])[1].rope,
        128,
        1000,
        dtype=dtype,
        query_scaling=QueryScaling(0.1, original_positions=48),
    )
    positions = torch.tensor([0, 47, 48, 95, 96, 999])
    theirs = get_llama_4_attn_scale(positions[None], 0.1, 48).flatten().to(dtype)
    for found in (table.rows(positions).query_factor, table.rows(positions, torch.tensor([6])).query_factor):
        assert found is not None and torch.equal(found, theirs)


@pytest.mark.parametrize("kind", ["whole", "after", "factor"])
def test_queries_and_keys_are_those_of_transformers(kind):
    """Normed as one (OLMo 2), after the rotation (HunYuan), with a factor (Ministral 3): norms and rotation theirs."""
    generator, (rows, queries, groups, dim) = torch.Generator().manual_seed(3), (5, 6, 2, 16)
    qkv = torch.randn(rows, (queries + 2 * groups) * dim, generator=generator)
    angle = torch.randn(rows, dim // 2, generator=generator)
    cos, sin = (torch.cat((part, part), dim=-1) for part in (angle.cos(), angle.sin()))
    factor = torch.rand(rows, generator=generator) + 1 if kind == "factor" else None
    widths = (queries * dim, groups * dim) if kind == "whole" else (dim, dim)
    weights = [torch.randn(width, generator=generator) for width in widths]
    norm = Olmo2RMSNorm if kind == "whole" else HunYuanDenseV1RMSNorm
    theirs = [norm(width, 1e-5) for width in widths]
    for one, weight in zip(theirs, weights, strict=True):
        one.weight.data = weight

    parts = qkv.split([queries * dim, groups * dim, groups * dim], dim=-1)
    if kind == "whole":
        parts = (theirs[0](parts[0]), theirs[1](parts[1]), parts[2])
    query, key, value = (part.view(1, rows, -1, dim).transpose(1, 2) for part in parts)
    query, key = apply_rotary_pos_emb(query, key, cos[None], sin[None])
    if kind == "after":
        query, key = theirs[0](query), theirs[1](key)
    if factor is not None:
        query = query * factor[:, None]

    signed = torch.cat((-sin[:, : dim // 2], sin[:, dim // 2 :]), dim=-1)
    norms = (
        None
        if kind == "factor"
        else QKNorms(weights[0], weights[1], 1e-5, whole=kind == "whole", after=kind == "after")
    )
    with references():
        layer = torch.zeros(rows, groups, dim), torch.zeros(rows, groups, dim), None
        rotation = Rotation(cos[:, None], signed[:, None], factor)
        found = rotate_and_store(qkv, rotation, layer, torch.arange(rows), norms)
    for mine, its in ((found, query), (layer[0], key), (layer[1], value)):
        torch.testing.assert_close(mine, its[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


def test_golden_llama3(tmp_path):
    """Llama 3.1: D = 128, base 5e5, 8 / 1 / 4 / 8192."""
    plain, _ = inverse_frequencies(_config(tmp_path, SCALINGS["default"])[1].rope, 128, 8192)
    frequencies, factor = inverse_frequencies(_config(tmp_path, LLAMA3)[1].rope, 128, 8192)
    golden = {
        20: 1.65604401e-2,
        28: 3.21144599e-3,
        29: 2.16657076e-3,
        32: 5.24846161e-4,
        36: 7.78465527e-5,
        63: 3.06892599e-7,
    }
    assert factor == 1.0
    assert {i: frequencies[i].item() for i in golden} == pytest.approx(golden, rel=1e-6)
    assert torch.equal(frequencies[:29], plain[:29])
    assert plain[29].item() == pytest.approx(2.61609925e-3, rel=1e-7)
    assert plain[32].item() == pytest.approx(1.41421356e-3, rel=1e-7)
    assert torch.equal(frequencies[36:], plain[36:] / 8)


def test_yarn_attention_factor(tmp_path):
    assert inverse_frequencies(_config(tmp_path, YARN)[1].rope, 128, 8192)[1] == pytest.approx(0.1 * math.log(4) + 1)


def test_yarn_without_factor_takes_the_ratio_of_lengths(tmp_path):
    _config(tmp_path, YARN)
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["rope_parameters"]["factor"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert ModelConfig.from_directory(tmp_path).rope.parameters == YarnScaling(131072 / 32768, 32768)
