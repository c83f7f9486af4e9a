"""The same tokens from targets and draft models that are GGUF files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import pytest
import torch

from foresay.server.cli.main import main
from foresay.server.cli.serving import rows
from foresay.server.engine.build import build_engine
from foresay.server.settings.config import Activations, EngineConfig
from foresay.server.settings.resolved import BUNDLED
from tests.combinations import alternating
from tests.same_tokens.bundled import texts_of
from tests.same_tokens.runs import assert_same
from tests.same_tokens.witness import Text
from tests.verifier.gguf_files import TypeOf, all_of, cache_of_its_own, convert, q4_k_m, tokens_of


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        cache_of_its_own(tmp_path_factory.mktemp("cache"), patch)
        yield


def file_of(directory: Path, name: str, kind: TypeOf) -> Path:
    """A bundled model as a file."""
    shutil.copytree(BUNDLED / name, directory / name)
    tokens = tokens_of(BUNDLED / "target", "gpt-2")
    convert(directory / name, directory / f"{name}.gguf", kind, tokens)
    return directory / f"{name}.gguf"


def texts(target: Path, draft: str, activations: Activations) -> dict[str, Text]:
    said = {"activations": activations, "quantization": "from gguf files"}
    return texts_of(draft, said, target=str(target), activations=activations)


@pytest.mark.parametrize(("kind", "activations"), alternating(["Q8_0", "Q4_0", "mixed"], ["int8", "model"]))
def test_files_draft_and_are_drafted_for(tmp_path, kind, activations) -> None:
    target = file_of(tmp_path, "target", q4_k_m if kind == "mixed" else all_of(kind))
    draft = file_of(tmp_path, "draft", all_of("Q8_0"))
    plain = texts(target, "none", activations)
    for drafter in (f"draft_model:{draft}", "ngram", f"{BUNDLED / 'draft'},suffix"):
        assert_same(plain, texts(target, drafter, activations))


def test_what_the_check_and_the_banner_show(tmp_path, capsys) -> None:
    target, draft = file_of(tmp_path, "target", q4_k_m), file_of(tmp_path, "draft", all_of("Q8_0"))
    assert main(["check", str(target), "--draft", str(draft)]) == 0
    assert "int4 in groups of 32" in capsys.readouterr().out
    config = EngineConfig(target=str(target), draft="none", kv_tokens=640, max_model_len=160, threads=1)
    for activations in ("model", "int8"):
        engine = build_engine(msgspec.structs.replace(config, activations=activations))
        decoder = engine.runner.verifier.decoder  # type: ignore[attr-defined]
        held = sum(linear.nbytes for linear in decoder.linears) + decoder.embedding.nbytes
        # What is planned for eight bits takes six where inputs are rounded.
        assert engine.info.weight_bytes == held if activations == "model" else engine.info.weight_bytes > held
        assert "int4 in groups of 32" in dict(rows(engine.info))["weights"]


def test_a_head_is_trained_from_what_a_file_stands_for(tmp_path, capsys) -> None:
    """And drafts for the file, from a vocabulary of its own."""
    target, out = file_of(tmp_path, "target", all_of("Q8_0")), tmp_path / "head"
    (tmp_path / "prompts.txt").write_text("Once upon a time\nThere was a fox\n")
    flags = ["--samples", "4", "--length", "40", "--steps", "2", "--batch", "2", "--vocabulary", "500"]
    words = ["train", "eagle3", "--target", str(target), "--prompts", str(tmp_path / "prompts.txt"), "--out", str(out)]
    with torch.enable_grad():
        assert main([*words, *flags]) == 0, capsys.readouterr().err
    assert json.loads((out / "config.json").read_text())["draft_vocab_size"] == 500
    assert_same(texts(target, "none", "int8"), texts(target, f"eagle3:{out}", "int8"))
