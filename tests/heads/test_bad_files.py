"""What is wrong with a head is named in one sentence by the real command, whose exit status is then not 0."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from foresay.server.cli.main import main
from foresay.verifier.heads.layouts import HeadTensors
from foresay.verifier.model.errors import ModelError
from tests.heads.published import make_eagle, make_medusa
from tests.heads.writing import change_config
from tests.same_tokens.test_directories import write_tokenizer
from tests.verifier.families import make
from tests.verifier.reading import load_decoder

Break = Callable[[Path], object]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a tokenizer, and sound heads for it."""
    root = tmp_path_factory.mktemp("models")
    make("llama2", root / "target", num_hidden_layers=6)
    write_tokenizer(root / "target", 290)
    (root / "target" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    target = load_decoder(root / "target")
    make_medusa(root / "medusa", target, "authors")
    make_medusa(root / "pickle", target, "pickle")
    for layout in ("safeailab", "speculators", "eagle1", "eagle1_pickle", "biased"):
        make_eagle(root / layout, target, layout)
    return root


def generate(target: Path, *arguments: str) -> int:
    size = ("--dtype", "float32", "--kv-tokens", "640", "--max-model-len", "256", "--threads", "1")
    return main(["generate", str(target), "--prompt", "the fox", "--max-tokens", "3", *size, *arguments])


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The one sentence; the progress of loading is left out."""
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [line for line in captured.err.replace("\r", "\n").splitlines() if line and not line.startswith("weights:")]
    assert len(lines) == 1, captured.err
    return lines[0]


def cut(name: str) -> Break:
    def broken(head: Path) -> None:
        whole = (head / name).read_bytes()
        (head / name).write_bytes(whole[: len(whole) // 2])

    return broken


def written(name: str, text: str) -> Break:
    return lambda head: (head / name).write_text(text)


def removed(name: str) -> Break:
    return lambda head: (head / name).unlink()


def configured(**changes: object) -> Break:
    return lambda head: change_config(head, **changes)


def layer_configured(**changes: object) -> Break:
    """Of speculators, whose layer has a configuration of its own."""

    def broken(head: Path) -> None:
        config = json.loads((head / "config.json").read_text())
        change_config(head, transformer_layer_config={**config["transformer_layer_config"], **changes})

    return broken


def resized(file: str, name: str, *shape: int) -> Break:
    def broken(head: Path) -> None:
        save_file({**load_file(head / file), name: torch.zeros(shape)}, head / file)

    return broken


class Trap:
    """What a pickle could run while it is read."""

    def __reduce__(self):
        return (print, ("this must not be printed",))


def trapped(name: str) -> Break:
    return lambda head: torch.save({"0.0.linear.weight": Trap()}, head / name)


MEDUSA, EAGLE = "medusa_lm_head.safetensors", "model.safetensors"


@pytest.mark.parametrize(
    ("head", "broken", "message"),
    [
        ("medusa", cut(MEDUSA), "medusa_lm_head.safetensors: not a complete safetensors file"),
        ("medusa", written(MEDUSA, ""), "medusa_lm_head.safetensors: not a complete safetensors file"),
        ("medusa", removed(MEDUSA), "there are no weights of a head; looked for medusa_lm_head.safetensors"),
        ("pickle", cut("medusa_lm_head.pt"), "medusa_lm_head.pt: not a complete file of tensors only: it is cut off"),
        ("pickle", written("medusa_lm_head.pt", "hello"), "medusa_lm_head.pt: not a complete file of tensors only"),
        ("pickle", trapped("medusa_lm_head.pt"), "or holds code, which is never run"),
        ("medusa", resized(MEDUSA, "0.0.linear.weight", 32, 32), "fit only the model they were trained for (they were"),
        ("medusa", resized(MEDUSA, "1.2.weight", 200, 64), "1.2.weight has shape [200, 64], expected [300, 64]"),
        ("medusa", written("config.json", "{"), "config.json: not valid JSON"),
        ("medusa", configured(acceptance={"greedy": [2]}), "acceptance: greedy must be a list of numbers from 0 to 1"),
        ("safeailab", cut(EAGLE), "model.safetensors: not a complete safetensors file"),
        ("eagle1_pickle", cut("pytorch_model.bin"), "pytorch_model.bin: not a complete file of tensors only"),
        ("eagle1_pickle", trapped("pytorch_model.bin"), "or holds code, which is never run"),
        ("biased", removed("model-00002-of-00002.safetensors"), "not there; the download may be incomplete"),
        ("biased", written("model.safetensors.index.json", "{}"), "weight_map must name a file for each tensor"),
        ("safeailab", written("config.json", "[1, 2]"), "config.json: expected a JSON object"),
        ("speculators", written("config.json", "not json"), "config.json: not valid JSON"),
        ("safeailab", removed("config.json"), "has no config.json"),
        ("speculators", layer_configured(vocab_size=320), "made for a vocabulary of 320, but the target's is 300"),
        ("safeailab", configured(num_key_value_heads=4), "self_attn.k_proj.weight has shape [32, 128]"),
    ],
)
def test_a_bad_head_is_named(models, tmp_path, capsys, head, broken, message) -> None:
    """A file that is cut, or of another model; a configuration that is none; a pickle with code in it."""
    shutil.copytree(models / head, tmp_path / head)
    broken(tmp_path / head)
    assert generate(models / "target", "--draft", str(tmp_path / head)) in (1, 2)
    line = error_line(capsys)
    assert line.startswith("foresay generate: ")
    assert message in line


@pytest.mark.parametrize("head", ["medusa", "pickle", "safeailab", "eagle1_pickle", "biased"])
def test_the_same_heads_work_when_they_are_whole(models, capsys, head) -> None:
    """Else the tests above would hold for any head."""
    assert generate(models / "target", "--draft", str(models / head)) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize("zipped", [True, False])
def test_a_damaged_pickle_is_named(tmp_path, zipped) -> None:
    """Bytes changed anywhere: it is read, or named, and nothing else is raised."""
    rng, file = random.Random(0), tmp_path / "medusa_lm_head.pt"
    torch.save({"0.1.weight": torch.randn(9, 8)}, file, _use_new_zipfile_serialization=zipped)
    whole, named = file.read_bytes(), 0
    for _ in range(150):
        damaged = bytearray(whole)
        for _ in range(rng.randrange(1, 8)):
            damaged[rng.randrange(len(whole))] = rng.randrange(256)
        file.write_bytes(damaged[: rng.randrange(len(whole))] if rng.random() < 0.3 else damaged)
        try:
            HeadTensors.read(tmp_path)
        except ModelError as error:
            named += str(file) in str(error)
    assert named > 50
