"""What ends Gemma 4's layers: what must not be is refused, and what there is is counted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foresay.server.catalog.hub import resolve
from foresay.server.engine.memory import Demand
from foresay.server.engine.parameters import expert_bytes, kept_in_16_bits, model_bytes, table_bytes
from foresay.server.settings.config import EngineConfig
from foresay.verifier.model.config import ModelConfig, matrices, parameters, stored_parameters, unused_parameters
from foresay.verifier.model.errors import ConfigError, WeightsError
from foresay.verifier.model.fields import Fields
from foresay.verifier.model.weights import load
from tests.verifier.families import FAMILIES, config_of, make
from tests.verifier.gguf_files import cache_of_its_own, convert
from tests.verifier.reading import load_decoder


def config(family: str, **values: Any) -> ModelConfig:
    given = config_of(family).to_dict() | {"architectures": [FAMILIES[family][1].__name__]} | values
    return ModelConfig.read(Fields(given, "config.json"))


@pytest.mark.parametrize(
    ("family", "values", "words"),
    [
        ("gemma4_embedded", {"vocab_size_per_layer_input": 299}, "layer_input 299 is less than vocab_size 300"),
        ("gemma4_embedded", {"hidden_size_per_layer_input": "8"}, "hidden_size_per_layer_input must be a whole number"),
        ("gemma4_moe", {"top_k_experts": None}, "top_k_experts"),
        ("gemma4_moe", {"top_k_experts": 9}, "top_k_experts must be a whole number from 1 to 8"),
        ("gemma4_moe", {"moe_intermediate_size": None}, "moe_intermediate_size"),
        ("gemma4_moe", {"num_experts": None}, "num_experts"),
        ("gemma4_moe", {"enable_moe_block": 1}, "enable_moe_block"),
    ],
)  # fmt: skip
def test_a_configuration_is_refused_by_the_name_of_its_field(family, values, words) -> None:
    with pytest.raises(ConfigError, match=words):
        config(family, **values)


def test_absent_embeddings_and_experts_are_none() -> None:
    for values in ({"hidden_size_per_layer_input": None}, {"hidden_size_per_layer_input": 0}):
        layer = config("gemma4_embedded", **values).first
        assert layer.embedding is None and layer.experts is None and layer.scaled


@pytest.mark.parametrize(
    ("family", "name", "missing"),
    [
        ("gemma4_embedded", "layer_scalar", "layers.0.layer_scalar"),
        ("gemma4_embedded", "embed_tokens_per_layer", "model.embed_tokens_per_layer.weight"),
        ("gemma4_embedded", "per_layer_projection.", "layers.0.per_layer_projection.weight"),
        ("gemma4_moe", "router.scale", "layers.0.router.scale"),
        ("gemma4_moe", "experts.down_proj", "layers.0.experts.0.down_proj.weight"),
    ],
)
def test_a_missing_tensor_is_named(tmp_path, family, name, missing) -> None:
    make(family, tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({each: one for each, one in load_file(file).items() if name not in each}, file, {"format": "pt"})
    with pytest.raises(WeightsError, match=f"{missing} is missing"):
        load_decoder(tmp_path, probed=False)


def test_a_table_that_does_not_fit_fp16_is_refused(tmp_path) -> None:
    make("gemma4_embedded", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.embed_tokens_per_layer.weight"][310, 5] = -65600.0
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(WeightsError, match=r"embed_tokens_per_layer\.weight does not fit float16"):
        load_decoder(tmp_path, torch.float16, probed=False)
    load_decoder(tmp_path, torch.bfloat16, probed=False)


def test_what_is_counted(tmp_path: Path) -> None:
    """All that is in the files; a GPU holds the table, which a CPU reads in its file; a row reads one of its rows."""
    for family in ("gemma4_embedded", "gemma4_moe"):
        theirs = make(family, tmp_path / family)
        ours = ModelConfig.from_directory(tmp_path / family)
        vectors = sum(one.numel() for name, one in theirs.named_parameters() if one.dim() == 1 or "router" in name)
        assert stored_parameters(ours) == theirs.num_parameters() - vectors
    own = ModelConfig.from_directory(tmp_path / "gemma4_embedded")
    table = 320 * 4 * 32
    assert table_bytes(own, "bfloat16") == 2 * table and unused_parameters(own) == table - 4 * 32
    packed, whole = (model_bytes(own, "bfloat16", packed) for packed in (True, False))
    assert packed == 2 * (parameters(own) - table) and whole == 2 * parameters(own)
    mixed = ModelConfig.from_directory(tmp_path / "gemma4_moe")
    each = 2 * 8 * 3 * 96 * 64
    assert expert_bytes(mixed, "bfloat16") == dict.fromkeys(range(3), each)
    assert mixed.intermediate_size == 160 + 3 * 96


def test_a_table_in_few_bits_is_held_as_floats(tmp_path, monkeypatch) -> None:
    """So the plan of a CPU counts it with the weights: nothing of it stays in the file."""
    cache_of_its_own(tmp_path / "cache", monkeypatch)
    make("gemma4_embedded", tmp_path / "plain", hidden_size_per_layer_input=64)
    numbers = 320 * 4 * 64
    for kind, held in (("Q8_0", numbers), ("F16", 0)):
        convert(tmp_path / "plain", tmp_path / f"{kind}.gguf", table_of(kind))
        made = resolve(tmp_path / f"{kind}.gguf")
        model = ModelConfig.from_directory(made)
        assert model.quantization is None, "nothing that is multiplied is"
        for dtype, item in (("bfloat16", 2), ("float32", 4)):
            rest = item * model.vocab_size * model.hidden_size + sum(
                (2 if kept_in_16_bits(model, dtype) else item) * inner * outer for _, inner, outer in matrices(model)
            )
            assert model_bytes(model, dtype, True) == rest + item * held
            demand = Demand.of(EngineConfig(target=str(made)), dtype, model, [])
            assert demand.weights["target"] == rest + item * held and (demand.mapped > 0) == (not held)
        table = load_decoder(made, torch.bfloat16, probed=False).table
        assert table is not None and table.numel() == numbers
        assert table.dtype is (torch.bfloat16 if held else torch.float16)


def table_of(kind: str) -> Callable[[str], str]:
    """A table of this type among matrices of fp16."""
    return lambda name: kind if "per_layer_token_embd" in name else "F16"


def test_a_copy_does_not_make_a_table_that_it_does_not_read(tmp_path, monkeypatch) -> None:
    """The target's copy that drafts has the target's; of few bits it would take as much again as floats."""
    cache_of_its_own(tmp_path / "cache", monkeypatch)
    make("gemma4_embedded", tmp_path / "plain", hidden_size_per_layer_input=64)
    convert(tmp_path / "plain", tmp_path / "x.gguf", table_of("Q8_0"))
    made = resolve(tmp_path / "x.gguf")
    assert load(made, ModelConfig.from_directory(made), torch.bfloat16, table="file").table is None
