"""``--quantize`` and ``foresay quantize``: what is made, and what plan and banner say of it."""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec
import pytest
import torch

from foresay.server.cli.main import main
from foresay.server.cli.serving import rows
from foresay.server.engine.build import build_engine
from foresay.server.engine.parameters import Device, choose_activations, model_bytes, packed_bytes, quantized
from foresay.server.settings.config import EngineConfig
from foresay.server.settings.resolved import BUNDLED, CannotRun
from foresay.spec.engine import EngineCore
from foresay.spec.request import Request
from foresay.spec.sampling import SamplingParams
from foresay.verifier.model.config import ModelConfig, stored_parameters
from foresay.verifier.model.decoder import Decoder
from foresay.verifier.model.quantization import Format, Quantization, Scheme
from foresay.verifier.model.weights import load
from foresay.verifier.model_runner import ModelRunner
from foresay.verifier.ops.kernels.cpu.jit import Processor
from tests.server.test_device import HOPPER
from tests.simulated.device import DEVICE, simulated
from tests.verifier.conftest import lesser

TARGET = BUNDLED / "target"


def engine_of(target: str, **settings: str) -> EngineCore:
    config = EngineConfig(target=target, draft="none", kv_tokens=640, max_model_len=160, threads=1)
    return build_engine(msgspec.structs.replace(config, **settings))


def written(engine: EngineCore) -> list[int]:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True)
    engine.add(Request(id="one", prompt=[5, 17, 200, 31], params=params))
    tokens: list[int] = []
    while len(tokens) < 40:
        tokens += [token for delta in engine.step() for token in delta.tokens]
    return tokens


@pytest.mark.parametrize("how", ["int8", "int4", "fp8"])
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


def test_a_checkpoint_sets_its_kv_cache(tmp_path, capsys) -> None:
    """kv_cache_scheme is what --kv-dtype auto is, in plan and banner; check says of activations that they stay."""
    out = tmp_path / "small"
    assert main(["quantize", "bundled", "--quantize", "fp8", "--out", str(out)]) == 0
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    group = next(iter(config["quantization_config"]["config_groups"].values()))
    group["input_activations"] = {"num_bits": 8, "type": "float", "dynamic": False}
    (out / "config.json").write_text(json.dumps(config))
    read, requested = engine_of(str(out)), engine_of("bundled", quantize="fp8", kv_dtype="fp8")
    assert written(read) == written(requested)
    assert (read.info.kv_dtype, read.info.kv_token_bytes) == ("fp8", requested.info.kv_token_bytes)
    assert engine_of(str(out), kv_dtype="int8").info.kv_dtype == "int8"
    assert read.info.activations == "model"
    words = f"activations stay {read.info.dtype}, not rounded to fp8"
    assert words in dict(rows(read.info))["weights"]
    assert main(["check", str(out), "--draft", "none"]) == 0
    assert words in capsys.readouterr().out


def test_the_command_writes_over_nothing(tmp_path, capsys) -> None:
    (tmp_path / "there").write_text("")
    assert main(["quantize", "bundled", "--out", str(tmp_path)]) == 2
    assert "--out" in capsys.readouterr().err


def test_the_plan_knows_the_bytes() -> None:
    engine = engine_of("bundled", quantize="int4")
    verifier = engine.runner.verifier
    assert isinstance(verifier, ModelRunner)
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
    with pytest.raises(CannotRun, match="--draft-quantize int8: its weights are quantised already"):
        quantized(ModelConfig.from_directory(tmp_path), "int8", "--draft-quantize")


MODEL = ModelConfig.from_directory(TARGET)
MXFP4 = replace(MODEL, quantization=Quantization("fp4", (("Linear", Scheme(4, 32, True, Format.MXFP4, floats=True)),)))
HERE = Device("cpu", 8 << 30)


@pytest.mark.parametrize(
    ("how", "device", "processor", "why"),
    [
        ("int4", HERE, "here", ""),
        ("int4", HERE, "without AVX-512", ""),
        ("mxfp4", HERE, "here", ""),
        ("int8", HERE, "here", ""),
        (None, HERE, "here", "no weights are whole numbers"),
        ("fp8", HERE, "here", "no weights are whole numbers"),
        ("int4", HERE, "plain", "the processor has none of the instructions"),
        ("int4", HOPPER, "here", "for a CPU alone"),
    ],
)
def test_activations_are_rounded_where_there_are_kernels(monkeypatch, how, device, processor, why) -> None:
    made = lesser(processor)
    monkeypatch.setattr(Processor, "here", classmethod(lambda cls: made))
    model = MXFP4 if how == "mxfp4" else quantized(MODEL, how, "--quantize")
    chosen = choose_activations(EngineConfig(), model, device)
    assert chosen.value == ("int8" if how in ("int4", "mxfp4") and not why else "model") and why in chosen.reason
    assert choose_activations(EngineConfig(activations="model"), model, device).value == "model"
    if not why:
        assert choose_activations(EngineConfig(activations="int8"), model, device).value == "int8"
        return
    with pytest.raises(CannotRun, match=f"--activations int8: .*{why}"):
        choose_activations(EngineConfig(activations="int8"), model, device)


def test_activations_are_shown(capsys) -> None:
    for activations, words, output in (
        ("int8", "activations rounded to int8", "int8 (asked for)"),
        ("model", "activations stay", "not rounded (asked for)"),
    ):
        info = engine_of("bundled", quantize="int4", activations=activations).info
        assert info.exact and info.activations == activations
        assert words in dict(rows(info))["weights"] and dict(rows(info))["activations"] == output
        assert main(["check", "--draft", "none", "--quantize", "int4", "--activations", activations]) == 0
        assert words in capsys.readouterr().out
    assert "activations" not in dict(rows(engine_of("bundled").info))
    assert main(["generate", "--activations", "int8", "--prompt", "hello"]) == 2
    assert "--activations int8: no weights are whole numbers" in capsys.readouterr().err
    assert main(["check", "--activations", "int8"]) == 1
    assert "leave --activations out" in capsys.readouterr().out


@pytest.mark.parametrize("how", ["int8", "int4", "fp8"])
def test_the_plan_of_a_gpu_knows_the_bytes(how) -> None:
    """Those of the linears as they are laid out there, and of the embedding; a tied head of floats is the embedding."""
    model = quantized(ModelConfig.from_directory(TARGET), how, "--quantize")
    with simulated():
        decoder = Decoder(model, load(TARGET, model, torch.bfloat16, DEVICE), 64)
        held = sum(linear.nbytes for linear in decoder.linears) + decoder.embedding.nbytes
    assert model_bytes(model, "bfloat16", packed=False) == held
    plain = replace(model, quantization=None)
    assert model_bytes(plain, "bfloat16", packed=False) == 2 * stored_parameters(plain)
