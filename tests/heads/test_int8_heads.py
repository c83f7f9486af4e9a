"""Heads whose matrices are int8: what they compute is what those numbers stand for."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from foresay.server.cli.main import main
from foresay.server.engine.drafters.registry import find
from foresay.server.settings.resolved import BUNDLED
from foresay.verifier.heads.layouts import HeadTensors, kind_of, quantize
from foresay.verifier.model.errors import ModelError
from foresay.verifier.ops.quantized import QuantizedMatrix
from tests.heads.published_eagle import make_eagle
from tests.heads.test_eagle_heads import Rig, features_of
from tests.heads.writing import change_config
from tests.same_tokens.heads import load_eagle as load
from tests.verifier.reading import random_tokens

FILE = "model.safetensors"


@pytest.fixture
def made(target, tmp_path) -> tuple[Path, Path]:
    """A head in floats, and the same in int8."""
    make_eagle(tmp_path / "floats", target("llama2"), "safeailab")
    quantize(tmp_path / "floats", tmp_path / "int8")
    return tmp_path / "floats", tmp_path / "int8"


def test_its_numbers_are_those_of_the_file(target, made, tmp_path) -> None:
    """A head of floats that has the same numbers has the same logits."""
    model, (floats, whole) = target("llama2"), made
    stored = load_file(whole / FILE)
    plain = {name: tensor for name, tensor in stored.items() if not name.endswith("_scale")}
    for name in (each.removesuffix("_scale") for each in stored if each.endswith("_scale")):
        values = stored[name]
        assert values.dtype == torch.int8
        plain[name] = QuantizedMatrix(values, stored[f"{name}_scale"], None, 8, values.shape[1]).plain()
    assert sum(tensor.dtype == torch.int8 for tensor in stored.values()) == 9
    save_file(plain, floats / FILE)
    tokens = random_tokens(random.Random(3), 45, 300)
    heads = [load(directory, model) for directory in (floats, whole)]
    features = features_of(model, tokens, heads[0].config.needs)
    expected, found = (Rig(head, tokens, features).text(1, 45)[0] for head in heads)
    assert torch.allclose(found, expected, rtol=1e-3, atol=1e-3)


def test_what_it_takes_is_counted(made) -> None:
    """As planned before a weight is read: about half of the same in bf16."""
    entries = (find(f"eagle3:{directory}") for directory in made)
    floats, whole = (entry.weights("bfloat16", packed=True)["head"] for entry in entries)
    assert 0.5 < whole / floats < 0.6


def test_it_is_quantised_once(made, tmp_path) -> None:
    with pytest.raises(ModelError, match="is quantised already"):
        quantize(made[1], tmp_path / "again")


@pytest.mark.parametrize("name", ["lm_head.weight", "midlayer.mlp.up_proj.weight"])
def test_scales_that_do_not_fit_are_named(target, made, name) -> None:
    stored = load_file(made[1] / FILE)
    save_file({**stored, f"{name}_scale": torch.ones(3, 2)}, made[1] / FILE)
    with pytest.raises(ModelError, match=r"must be int8 in groups, each with a scale in .*weight_scale"):
        load(made[1], target("llama2"))


def test_matrices_side_by_side_are_quantised_alike(target, made) -> None:
    stored, floats = load_file(made[1] / FILE), load_file(made[0] / FILE)
    name = "midlayer.mlp.up_proj.weight"
    del stored[f"{name}_scale"]
    save_file({**stored, name: floats[name]}, made[1] / FILE)
    with pytest.raises(ModelError, match=r"quantised alike, not .*gate_proj: int8 in groups of 32, .*up_proj: floats"):
        load(made[1], target("llama2"))


def test_other_quantisations_are_refused(target, made) -> None:
    change_config(made[1], quantization_config={"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True})
    with pytest.raises(ModelError, match=r"a head's weights in .* are not supported; supported: .*int8"):
        load(made[1], target("llama2"))


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_the_command_writes_them(tmp_path, capsys, kind) -> None:
    assert main(["quantize", str(BUNDLED / kind), "--out", str(tmp_path / "int8")]) == 0
    assert "head in int8" in capsys.readouterr().out
    assert kind_of(tmp_path / "int8") == kind_of(BUNDLED / kind)
    assert any(name.endswith("_scale") for name in HeadTensors.read(tmp_path / "int8").tensors)
    assert main(["quantize", str(BUNDLED / kind), "--quantize", "int4", "--out", str(tmp_path / "int4")]) == 2
    assert (
        "--quantize int4: of heads, only EAGLE and DFlash ones can be written, and only in int8"
        in capsys.readouterr().err
    )
