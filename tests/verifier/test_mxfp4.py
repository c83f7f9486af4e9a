"""Floats of four bits as gpt-oss's files and llama.cpp's have them: what they stand for, and what is made of them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.utils.quantization_config import Mxfp4Config

from foresay.server.catalog.hub import resolve
from foresay.server.engine.parameters import packed_bytes
from foresay.verifier.model.checkpoint import SINGLE, Checkpoint
from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.errors import WeightsError
from foresay.verifier.model.gguf.file import GgufFile
from foresay.verifier.model.weights import check
from foresay.verifier.ops.quantized import E8M0, QuantizedMatrix
from tests.verifier.families import make
from tests.verifier.gguf_files import all_of, cache_of_its_own, convert
from tests.verifier.mxfp4 import QUANTIZATION, publish
from tests.verifier.reading import Reader, load_decoder

TOKENS = [7, 3, 250, 41, 99, 12, 180, 5, 77, 291, 14] * 5


def test_every_code_by_every_scale_is_what_transformers_makes_of_it() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(1, 256, 1, 1)
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).repeat(1, 1, 16)
    theirs = convert_moe_packed_tensors(blocks, scales)[0].T
    ours = QuantizedMatrix(blocks.view(256, 256), scales[0].view(E8M0), None, 4, 512).plain()
    assert torch.equal(ours.bfloat16().view(torch.int16), theirs.contiguous().view(torch.int16))
    assert torch.equal(ours, theirs.float())


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    directory: Path = tmp_path_factory.mktemp("mxfp4")
    publish(directory)
    return directory


def test_logits_are_those_of_transformers(files) -> None:
    how: dict[str, Any] = {"dtype": torch.float32, "quantization_config": Mxfp4Config(dequantize=True)}
    oracle = GptOssForCausalLM.from_pretrained(files / "published", **how).eval()
    with torch.inference_mode():
        expected = oracle(torch.tensor([TOKENS])).logits[0]
    found = Reader(load_decoder(files / "published", torch.float32)).alone(TOKENS)
    assert (found - expected).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_are_those_of_the_checkpoint_written_out(files, dtype) -> None:
    found, written = (load_decoder(files / kind, dtype) for kind in ("published", "written"))
    assert torch.equal(Reader(found).alone(TOKENS), Reader(written).alone(TOKENS))
    config = found.config
    embedding = config.vocab_size * config.hidden_size * dtype.itemsize
    assert packed_bytes(config, str(dtype).removeprefix("torch.")) == embedding + sum(
        one.nbytes for one in found.linears
    )
    assert str(config.quantization) == "fp4 in groups of 32"


def test_a_scale_of_a_gguf_file_that_is_none_is_refused(tmp_path, monkeypatch) -> None:
    cache_of_its_own(tmp_path / "cache", monkeypatch)
    make("qwen3", tmp_path / "plain", hidden_size=64, intermediate_size=128)
    convert(tmp_path / "plain", tmp_path / "x.gguf", all_of("NVFP4"))
    with (tmp_path / "x.gguf").open("r+b") as file:
        file.seek(GgufFile.read(tmp_path / "x.gguf").tensors["blk.0.ffn_up.weight"].start)
        file.write(b"\x7f")
    with pytest.raises(WeightsError, match=r"0.mlp.up_proj.weight has scales that are NaN"):
        load_decoder(resolve(tmp_path / "x.gguf"))


@pytest.mark.parametrize("part", ["gate_up_proj_blocks", "down_proj_scales", "down_proj_bias"])
def test_what_lacks_is_named(files, part, tmp_path) -> None:
    tensors, name = load_file(files / "published" / SINGLE), f"model.layers.1.mlp.experts.{part}"
    del tensors[name]
    save_file(tensors, tmp_path / SINGLE)
    (tmp_path / "config.json").write_text((files / "published" / "config.json").read_text())
    with pytest.raises(WeightsError, match=name if "bias" not in part else r"experts\.0\.down_proj\.bias"):
        load_decoder(tmp_path)


#: gpt-oss-20b's config.json, but for its number of layers (24).
PUBLISHED: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "initializer_range": 0.02, "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_hidden_layers": 2, "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False,
    "pad_token_id": 199999, "quantization_config": QUANTIZATION, "rms_norm_eps": 1e-05, "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    }, "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "use_cache": True, "vocab_size": 201088,
}  # fmt: skip


def publish_headers(directory: Path) -> None:
    """Files of the real model's shapes and of no content: what transformers has, experts as the hub's files have
    them."""
    values = {key: value for key, value in PUBLISHED.items() if key != "quantization_config"}
    with torch.device("meta"):
        model = GptOssForCausalLM(GptOssConfig(**values))
    header, at = dict[str, Any](), 0
    for name, tensor in model.state_dict().items():
        parts = {name: ("BF16", list(tensor.shape), 2 * tensor.numel())}
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inner, outer = tensor.shape
            groups = [experts, outer, inner // 32]
            parts = {
                f"{name}_blocks": ("U8", [*groups, 16], tensor.numel() // 2),
                f"{name}_scales": ("U8", groups, tensor.numel() // 32),
            }
        for each, (kind, shape, size) in parts.items():
            header[each] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + size]}
            at += size
    text = json.dumps(header).encode()
    with (directory / SINGLE).open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    (directory / "config.json").write_text(json.dumps(PUBLISHED))


def test_gpt_oss_as_it_is_published_fits(tmp_path) -> None:
    publish_headers(tmp_path)
    config = ModelConfig.from_directory(tmp_path)
    check(Checkpoint.open(tmp_path), config)
    experts = 2 * 32 * (3 * 2880 * 2880) * 17 // 32
    rest = 2 * (2880 * 64 * (64 + 8 + 8 + 64)) + 2 * 201088 * 2880
    assert packed_bytes(config, "bfloat16") == experts + 2 * rest
