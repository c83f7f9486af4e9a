"""``--quantize`` and ``foresay quantize``: what is made, what plan and banner say of it, where it is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec
import pytest
import torch

from server.cli.banner import rows
from server.cli.main import main
from server.engine.build import build_engine
from server.engine.device import Device
from server.engine.memory import model_bytes, packed_bytes
from server.engine.quantized import check_device, quantized
from server.settings.config import EngineConfig
from server.settings.resolved import BUNDLED
from server.settings.unfit import Unfit
from spec.engine import Engine
from spec.request import Request
from spec.sampling import SamplingParams
from verifier.model.config import ModelConfig
from verifier.paged_model import PagedModel

TARGET = BUNDLED / "target"


def engine_of(target: str, **settings: str) -> Engine:
    config = EngineConfig(target=target, draft="none", kv_tokens=640, max_model_len=160, threads=1)
    return build_engine(msgspec.structs.replace(config, **settings))


def written(engine: Engine) -> list[int]:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True)
    engine.add(Request(id="one", prompt=[5, 17, 200, 31], params=params))
    tokens: list[int] = []
    while len(tokens) < 40:
        tokens += [token for delta in engine.step() for token in delta.tokens]
    return tokens


@pytest.mark.parametrize("how", ["int8", "int4"])
def test_what_the_command_writes_is_what_the_flag_makes(tmp_path, capsys, how) -> None:
    out = tmp_path / "small"
    assert main(["quantize", "bundled", "--quantize", how, "--out", str(out)]) == 0
    assert f"foresay serve {out}" in capsys.readouterr().out
    made, read = engine_of("bundled", quantize=how), engine_of(str(out))
    assert written(made) == written(read)
    assert made.info.weight_bytes == read.info.weight_bytes
    assert "made of the files' floats" in made.info.quantization
    assert "from compressed-tensors files" in read.info.quantization
    assert (out / "tokenizer.json").exists()


def test_the_command_writes_over_nothing(tmp_path, capsys) -> None:
    (tmp_path / "there").write_text("")
    assert main(["quantize", "bundled", "--out", str(tmp_path)]) == 2
    assert "--out" in capsys.readouterr().err


def test_the_plan_knows_the_bytes() -> None:
    engine = engine_of("bundled", quantize="int4")
    verifier = engine.runner.verifier
    assert isinstance(verifier, PagedModel)
    decoder = verifier.decoder
    held = sum(linear.nbytes for linear in decoder.linears) + decoder.embedding.nbytes
    assert engine.info.weight_bytes == held
    assert dict(rows(engine.info))["weights"].startswith("int4 in groups of 128, the output head int8")
    model = ModelConfig.from_directory(TARGET)
    sizes = [packed_bytes(quantized(model, how, "--quantize"), "bfloat16") for how in (None, "int8", "int4")]
    assert sizes == sorted(sizes, reverse=True)


def test_weights_are_quantised_once(tmp_path) -> None:
    values = json.loads((TARGET / "config.json").read_text())
    about = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(values | {"quantization_config": about}))
    with pytest.raises(Unfit, match="--draft-quantize int8: its weights are quantised already"):
        quantized(ModelConfig.from_directory(tmp_path), "int8", "--draft-quantize")


@pytest.mark.parametrize("flag", ["quantize", "draft_quantize"])
def test_a_gpu_refuses_to_make_what_it_would_not_multiply(monkeypatch, flag) -> None:
    gpu = Device("cuda:0", 1 << 34, 1 << 34, "", (9, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Device, "cuda", classmethod(lambda cls: gpu))
    with pytest.raises(Unfit, match=f"--{flag.replace('_', '-')} int8: a GPU"):
        build_engine(msgspec.structs.replace(EngineConfig(), **{flag: "int8"}))
    check_device(EngineConfig())


def test_on_a_gpu_files_of_whole_numbers_take_what_floats_do() -> None:
    model = ModelConfig.from_directory(TARGET)
    made = replace(model, quantization=quantized(model, "int4", "").quantization)
    assert model_bytes(made, "bfloat16", packed=False) == model_bytes(model, "bfloat16", packed=False)
