"""A family that Foresay does not have, declared here alone: it loads, is computed as transformers does, is served and
drafted for."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import OlmoConfig, OlmoForCausalLM

from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.errors import UnsupportedArchitecture
from foresay.verifier.model.families import FAMILIES
from foresay.verifier.model.families.family import Family, attention, layer_count, mlp
from foresay.verifier.model.fields import Fields
from foresay.verifier.model.layers import Layer, Stack
from foresay.verifier.model.products import NormKind
from foresay.verifier.model.rope_config import read_rope
from tests.same_tokens.models import Pair, blur
from tests.same_tokens.runs import assert_same, drafting, expected, jobs_of, whole
from tests.same_tokens.witness import run
from tests.verifier.families import SHAPE, randomise
from tests.verifier.reading import Reader, load_decoder, random_tokens


def olmo(fields: Fields) -> Stack:
    """OLMo 1: LayerNorm that has neither weight nor bias."""
    fields.refuse("clip_qkv")
    norm = NormKind(1e-5, centred=True, weighted=False, wide=True)
    layer = Layer(attention(fields, read_rope(fields)), mlp(fields), norm)
    return Stack((layer,) * layer_count(fields), norm)


@pytest.fixture
def models(tmp_path, monkeypatch) -> Pair:
    shape: dict[str, Any] = SHAPE
    oracle = OlmoForCausalLM(OlmoConfig(**shape)).eval()
    randomise(oracle, 0)
    for name in ("target", "draft"):
        oracle.save_pretrained(tmp_path / name)
        blur(oracle)
    with pytest.raises(UnsupportedArchitecture, match="OlmoForCausalLM"):
        ModelConfig.from_directory(tmp_path / "target")
    monkeypatch.setitem(FAMILIES, "OlmoForCausalLM", Family("OLMo", olmo))
    target, draft = tmp_path / "target", tmp_path / "draft"
    return Pair(target, draft, load_decoder(target, torch.float32), load_decoder(draft, torch.float32))


def test_its_logits_are_those_of_transformers(models) -> None:
    reader, tokens = Reader(models.target), random_tokens(random.Random(1), 50, 300)
    oracle = OlmoForCausalLM.from_pretrained(models.directory, dtype=torch.float32)
    with torch.inference_mode():
        wanted = oracle(torch.tensor([tokens])).logits[0]
    at_once = reader.alone(tokens)
    assert (at_once - wanted).abs().max() < 1e-4
    assert torch.equal(reader.read_in_pieces(reader.open(), tokens, lambda: 3), at_once)


@pytest.mark.parametrize("drafter", ["ngram", "chain4", "4,4,2,2,1", "truth"])
def test_it_is_drafted_for(models, drafter) -> None:
    lengths, count = (9, 17, 33, 5), 12
    jobs, wanted = jobs_of(models.vocab_size, lengths, count), expected(models, lengths, count)
    assert_same(wanted, run(drafting(models, drafter, whole(jobs, wanted), max_seqs=1), jobs))
