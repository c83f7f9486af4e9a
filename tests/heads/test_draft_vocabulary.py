"""The tokens that a head drafts of a large vocabulary: the first ids, the ends of texts, and what came lately."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from foresay.drafters.eagle import MtpDrafter
from foresay.server.engine.build import build_engine
from foresay.verifier.heads import layer as head_layer
from foresay.verifier.heads.layer import DraftVocabulary
from tests.heads.mtp import Mtp
from tests.same_tokens.runs import assert_same, jobs_of, plain
from tests.same_tokens.test_directories import config, witnessed
from tests.same_tokens.witness import run
from tests.verifier.families import make
from tests.verifier.reading import load_decoder


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def directory(request, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("qwen3_5")
    make("qwen3_5", made, tie_word_embeddings=request.param, eos_token_id=299)
    Mtp().put_beside(made)
    return made


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_layer, "DRAFTED", 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_emitted_tokens_replace_the_least_recent_ones(directory, dtype) -> None:
    target = load_decoder(directory, dtype)
    drafted = DraftVocabulary.of(target)
    assert drafted is not None
    assert drafted.token_ids.tolist() == [*range(63), 299]
    x = torch.randn(3, target.config.hidden_size).to(dtype)
    whole = target.head.wide(x)
    for emitted, there in (
        ([], {*range(63), 299}),
        ([100, 5, 100, 101], {*range(61), 100, 101, 299}),
        ([*range(200, 262), 5], {*range(200, 262), 5, 101}),
    ):
        drafted.emitted(emitted)
        assert set(drafted.token_ids.tolist()) == there
        assert torch.equal(drafted.head.wide(x), whole[:, drafted.token_ids])


@pytest.mark.parametrize("tree", [None, "3,2,1"])
def test_texts_are_the_same_and_their_tokens_can_be_drafted(directory, tree) -> None:
    engine = witnessed(build_engine(config(directory, "mtp", draft_tree=tree)))
    jobs = jobs_of(300, (9, 30, 17, 1), 20)
    assert_same(plain(load_decoder(directory), jobs), run(engine, jobs))
    drafter = getattr(engine.drafter, "configured", None) or engine.drafter.members["mtp"]  # type: ignore[union-attr]
    assert isinstance(drafter, MtpDrafter) and drafter.head.vocabulary is not None
    last = run(engine, jobs[-1:])[jobs[-1].id].tokens
    assert set(last) <= set(drafter.head.vocabulary.token_ids.tolist())


def test_a_vocabulary_of_few_tokens_or_of_no_floats_is_drafted_whole(directory, monkeypatch) -> None:
    target = load_decoder(directory)
    monkeypatch.setattr(head_layer, "DRAFTED", 151)
    assert DraftVocabulary.of(target) is None
    monkeypatch.setattr(head_layer, "DRAFTED", 150)
    assert DraftVocabulary.of(target) is not None
    quantized = load_decoder(directory, quantize="int8")
    assert (DraftVocabulary.of(quantized) is None) == (not target.config.tie_word_embeddings)
