"""The teacher of a target that is a GGUF file computes what the floats of that file do."""

from __future__ import annotations

import pytest
import torch

from foresay.drafters.training.teacher import _of_gguf
from foresay.verifier.model.errors import ModelError
from foresay.verifier.model.hub import resolve
from tests.verifier.families import FAMILIES, make
from tests.verifier.gguf_files import all_of, cache_of_its_own, convert

WIDTHS = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


@pytest.mark.parametrize(
    ("family", "shape"), [("smollm", {}), ("gemma3", {"query_pre_attn_scalar": 64, "num_hidden_layers": 6})]
)
def test_its_logits(tmp_path, monkeypatch, family, shape) -> None:
    """Gemma's norms are kept less one elsewhere, and whole there."""
    cache_of_its_own(tmp_path / "cache", monkeypatch)
    types = {"layer_types": ["sliding_attention"] * 5 + ["full_attention"]} if family == "gemma3" else {}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    make(family, tmp_path / "plain", **{**WIDTHS, **heads, **shape, **types})
    convert(tmp_path / "plain", tmp_path / "x.gguf", all_of("Q8_0"))
    oracle = FAMILIES[family][1].from_pretrained(tmp_path / "plain", dtype=torch.float32)
    found, tokens = _of_gguf(resolve(tmp_path / "x.gguf"), torch.float32).eval(), torch.arange(3, 40)[None]
    with torch.inference_mode():
        assert (found(tokens).logits - oracle(tokens).logits).abs().max() < 1e-3


def test_a_model_of_texts_and_images_is_refused(tmp_path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["MuseGlimmerForConditionalGeneration"]}')
    with pytest.raises(ModelError, match="texts and images"):
        _of_gguf(tmp_path, torch.float32)
