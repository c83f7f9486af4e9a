"""A mixture that is carved out of a dense model: what it computes, how it is cut, and that it is served."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from bench import BadOption, carve
from foresay.server.engine.build import build_engine
from foresay.server.settings.config import EngineConfig
from foresay.spec.request import Request
from foresay.spec.sampling import SamplingParams
from tests.same_tokens.test_directories import write_tokenizer
from tests.verifier.families import make

TEXT = "the quick brown fox says to the lazy dog that the other fox jumps over dogs. " * 40


def carved(source: Path, out: Path, *flags: str) -> Path:
    parser = ArgumentParser()
    carve.options(parser)
    (source / "text.txt").write_text(TEXT, "utf-8")
    carve.main(parser.parse_args([str(source), str(out), "--text", str(source / "text.txt"), *flags]))
    return out


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2 of 256 inner units."""
    made = tmp_path_factory.mktemp("dense")
    make("qwen2", made, intermediate_size=256, vocab_size=290)
    write_tokenizer(made, 290)
    (made / "tokenizer_config.json").write_text("{}", "utf-8")
    return made


def logits(directory: Path) -> torch.Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = Tokenizer.from_file(str(directory / "tokenizer.json")).encode(TEXT).ids[:60]
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([ids])).logits
    return found


def test_with_all_experts_it_is_the_dense_model(dense, tmp_path) -> None:
    """But for rounding its weights to bf16, and the chances of experts, which are nearly equal."""
    made = carved(dense, tmp_path / "all", "--experts", "4", "--chosen", "4", "--shared", "64")
    ours, theirs = logits(made), logits(dense)
    assert torch.nn.functional.cosine_similarity(ours, theirs, dim=-1).min() > 0.999
    fewer = logits(carved(dense, tmp_path / "one", "--experts", "4", "--chosen", "1", "--shared", "64"))
    assert (fewer - theirs).abs().mean() > 5 * (ours - theirs).abs().mean()


def test_units_that_are_active_together_are_an_expert_and_the_router_finds_it(monkeypatch) -> None:
    """Two kinds of tokens, which a direction of the hidden state tells apart; and units that are always active."""
    monkeypatch.setattr(carve, "ACTIVE", 0.6)
    of = torch.Generator().manual_seed(0)
    kind = torch.randint(0, 2, (400,), generator=of)
    hidden = torch.randn(400, 16, generator=of) + 3.0 * torch.nn.functional.one_hot(kind, 16)
    inner = 0.1 * torch.rand(400, 20, generator=of)
    inner[:, :4] += 5.0
    for group in (0, 1):
        inner[kind == group, 4 + group : 20 : 2] += 1.0
    cut = carve.carved(hidden, inner.repeat_interleave(10, dim=1), 40, 2)
    assert cut.shared.tolist() == [*range(40)]
    kinds = [{unit // 10 % 2 for unit in units.tolist()} for units in cut.experts]
    assert sorted(map(tuple, kinds)) == [(0,), (1,)]
    chosen = (hidden @ cut.router.T).argmax(dim=1)
    by_kind = torch.tensor([kinds.index({0}), kinds.index({1})])
    assert (chosen == by_kind[kind]).float().mean() > 0.95


def test_it_is_served(dense, tmp_path) -> None:
    made = carved(dense, tmp_path / "made", "--experts", "6", "--chosen", "2", "--shared", "64")
    config = EngineConfig(target=str(made), draft="suffix", device="cpu", max_model_len=128, kv_tokens=512)
    engine = build_engine(config)
    engine.add(Request(id="", prompt=[5, 6, 7], params=SamplingParams(max_tokens=20, ignore_eos=True)))
    woken = []
    while engine.has_work:
        engine.step()
        woken.append(engine.runner.woken)
    assert max(woken) >= 2 and engine.info.exact


def test_what_cannot_be_carved(dense, tmp_path) -> None:
    with pytest.raises(BadOption, match="192 are left"):
        carved(dense, tmp_path / "out", "--experts", "7", "--shared", "64")
