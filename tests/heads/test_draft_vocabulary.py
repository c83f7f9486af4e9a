"""The tokens that a drafter drafts of many: the first ids, the ends of texts, and what was said lately."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foresay.drafters.levels import TreeDrafter
from foresay.server.engine import parameters
from foresay.server.engine.build import build_engine
from foresay.server.engine.drafters.registry import drafts
from foresay.server.engine.vocabulary import drafted_tokens
from foresay.server.settings.config import EngineConfig
from foresay.server.settings.resolved import BUNDLED
from foresay.spec.errors import ConfigurationError
from foresay.verifier.graphs.runner import GraphStepRunner
from foresay.verifier.heads.vocabulary import MOST_MISSING, WINDOW, DraftVocabulary
from foresay.verifier.model.linear import Linear
from foresay.verifier.ops.kernels.cpu.jit import Processor
from tests.heads.mtp import Mtp
from tests.kernels.emulated import emulation_of
from tests.same_tokens.captured import run_freely
from tests.same_tokens.models import make_pair
from tests.same_tokens.runs import assert_same, jobs_of, plain
from tests.same_tokens.test_directories import config, witnessed, write_tokenizer
from tests.same_tokens.witness import run
from tests.verifier.families import make
from tests.verifier.quantized_weights import E2M1, KINDS, STEPPED, matrix_of
from tests.verifier.reading import load_decoder


def floats(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(150, 64, generator=torch.Generator().manual_seed(1)).to(dtype)


def after(vocabulary: DraftVocabulary, *said: int) -> set[int]:
    vocabulary.observe("text", said, 0)
    vocabulary.drop_text("text")
    return set(vocabulary.token_ids.tolist())


# -- which tokens ------------------------------------------------------------------------------------------------------


def test_what_is_said_replaces_what_was_said_longest_ago() -> None:
    drafted = DraftVocabulary(Linear(floats()), 64, ends=[149, 3])
    assert drafted.token_ids.tolist() == [*range(63), 149]
    assert after(drafted) == {*range(63), 149}
    assert after(drafted, 100, 5, 100, 101) == {*range(61), 100, 101, 149}
    assert after(drafted, *range(70, 132), 5) == {*range(70, 132), 5, 149}
    assert after(drafted, *range(150)) == set(range(86, 150)), "more than there is room for: the last ones"
    assert after(drafted, 1_000, 7) == {*range(87, 150), 7}, "the target may have tokens that the drafter lacks"
    assert 7 in drafted and 86 not in drafted


def test_its_tokens_can_have_other_ids_in_the_target() -> None:
    ids = torch.arange(150).flip(0) + 1_000
    drafted = DraftVocabulary(Linear(floats()), 64, ends=[1_000, 5], ids=ids)
    assert set(drafted.token_ids.tolist()) == {*range(1_087, 1_150), 1_000}
    assert after(drafted, 3, 1_004) == {*range(1_088, 1_150), 1_000, 1_004}
    x = floats()[:3]
    assert torch.equal(drafted.head.wide(x), Linear(floats()).wide(x)[:, 1_149 - drafted.token_ids])


def test_a_text_that_says_other_things_gets_the_whole_matrix() -> None:
    drafted = DraftVocabulary(Linear(floats()), 64)
    text = [0] * WINDOW
    drafted.observe("a", text, WINDOW)
    assert drafted.covers("a") and drafted.covers("unknown")
    allowed = int(MOST_MISSING * WINDOW)
    drafted.observe("a", [*text, *range(70, 70 + allowed)], WINDOW)
    assert drafted.covers("a")
    drafted.observe("a", [*text, *range(70, 70 + 2 * allowed)], WINDOW)
    assert not drafted.covers("a") and drafted.covers("b")
    drafted.observe("a", [*text, *range(70, 70 + 2 * allowed), *text], WINDOW)
    assert drafted.covers("a"), "once it says nothing new any more"
    drafted.observe("c", [*range(100, 140)], 40)
    assert drafted.covers("c"), "a prompt is not what the target says"
    drafted.observe("c", [*range(100, 140), *range(10, 60)], 40)
    assert not drafted.covers("c")
    drafted.drop_text("c")
    assert drafted.covers("c")
    pinned = DraftVocabulary(Linear(floats()), 64, adaptive=False)
    pinned.observe("a", range(150), 0)
    assert pinned.covers("a")


def bits_kept(whole: Linear) -> None:
    """Logits have the bits of the whole matrix, also once rows were replaced."""
    x = torch.randn(3, whole.in_features, generator=torch.Generator().manual_seed(2)).to(whole.dtype)
    assert DraftVocabulary.supports(whole)
    drafted = DraftVocabulary(whole, 77, ends=[whole.out_features - 1])
    for said in ((), (100, 101, 5), range(60, 120)):
        after(drafted, *said)
        assert torch.equal(drafted.head.wide(x), whole.wide(x)[:, drafted.token_ids])


@pytest.mark.parametrize("kind", [*KINDS, *STEPPED, *E2M1])
def test_rows_of_a_quantised_matrix_keep_their_bits(kind) -> None:
    for rounds in {False, not kind.startswith("fp8")}:
        bits_kept(Linear(matrix_of((256, 150), kind), None, torch.float32, rounds=rounds))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_floats_keep_their_bits(dtype) -> None:
    bits_kept(Linear(floats(dtype)))


def test_where_rows_are_in_pairs_of_words_all_tokens_are_drafted(monkeypatch) -> None:
    made = emulation_of("sapphirerapids")
    monkeypatch.setattr(Processor, "here", classmethod(lambda cls: made))
    assert not DraftVocabulary.supports(Linear(matrix_of((128, 150), "int8"), None, torch.bfloat16))
    assert DraftVocabulary.supports(Linear(matrix_of((128, 150), "int8"), None, torch.bfloat16, rounds=True))


# -- same tokens -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def hybrid(request, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("qwen3_5")
    make("qwen3_5", made, tie_word_embeddings=request.param, eos_token_id=299)
    Mtp().put_beside(made)
    return made


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameters, "DRAFTED", 64)


def drafter_of(engine, name: str) -> TreeDrafter:
    found = getattr(engine.drafter, "configured", None) or engine.drafter.members[name]
    assert isinstance(found, TreeDrafter)
    return found


@pytest.mark.parametrize("how", [{}, {"quantize": "int8"}, {"draft_tree": "3,2,1"}], ids=["auto", "int8", "tree"])
def test_a_layer_for_further_tokens_drafts_what_was_said(hybrid, few, how) -> None:
    engine = witnessed(build_engine(config(hybrid, "mtp", **how)))
    jobs = jobs_of(300, (9, 30, 17, 1), 20)
    if "quantize" not in how:
        assert_same(plain(load_decoder(hybrid), jobs), run(engine, jobs))
    vocabulary = drafter_of(engine, "mtp").vocabulary
    assert vocabulary is not None and len(vocabulary.token_ids) == 64
    last = run(engine, jobs[-1:])[jobs[-1].id].tokens
    assert set(last) <= set(vocabulary.token_ids.tolist())


def narrowed(drafter: TreeDrafter, monkeypatch: pytest.MonkeyPatch) -> set[bool]:
    """Whether levels are drafted with fewer tokens, or with all, from here on."""
    found, made = set[bool](), drafter._made

    def noted(*given: Any) -> Any:
        found.add(given[2][-1])
        return made(*given)

    monkeypatch.setattr(drafter, "_made", noted)
    return found


@pytest.fixture(scope="module", params=["smollm", "qwen3_5"])
def directory(request, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pair")
    make_pair(request.param, root, torch.float32)
    for each in ("target", "draft"):
        write_tokenizer(root / each, 290)
    return root


@pytest.mark.parametrize(
    ("vocab", "shape"),
    [("auto", {"draft_tokens": 3}), ("100", {"draft_tree": "3,2,1"}), ("auto", {}), ("full", {"draft_tree": "8,8"})],
    ids=str,
)
def test_a_draft_model_with_fewer_tokens_changes_no_text(directory, few, vocab, shape, monkeypatch) -> None:
    draft = f"draft_model:{directory / 'draft'}"
    engine = witnessed(build_engine(config(directory / "target", draft, draft_vocab=vocab, max_seqs=4, **shape)))
    drafter = drafter_of(engine, "draft_model")
    used = narrowed(drafter, monkeypatch)
    jobs = jobs_of(290, (9, 30, 17, 1, 40), 40)
    expected = plain(load_decoder(directory / "target"), jobs)
    for _ in range(2):
        assert_same(expected, run(engine, jobs))
    assert (drafter.vocabulary is None) == (vocab == "full")
    assert drafter.vocabulary is None or not drafter.vocabulary._texts, "texts are forgotten"
    if shape:
        assert used == {"auto": {True, False}, "100": {True}, "full": {False}}[vocab]


@pytest.mark.parametrize("directory", ["smollm"], indirect=True)
def test_a_draft_model_that_also_drafts_for_the_targets_copy(directory, few) -> None:
    """Levels of its own are cut, those of the copy's rounds are not."""
    draft = f"draft_model:{directory / 'draft'}"
    engine = witnessed(build_engine(config(directory / "target", f"{draft},{draft} > self:int8", max_seqs=4)))
    jobs = jobs_of(290, (9, 30, 17, 1, 40), 40)
    expected = plain(load_decoder(directory / "target"), jobs)
    for _ in range(3):
        assert_same(expected, run(engine, jobs))


@pytest.mark.parametrize("vocab", ["auto", "100"])
@pytest.mark.parametrize("kind", ["eagle3", "draft_model"])
def test_what_ships_with_the_bundled_target_drafts_fewer(few, kind, vocab) -> None:
    target, draft = BUNDLED / "target", f"{kind}:{BUNDLED / kind.removesuffix('_model')}"
    engine = witnessed(build_engine(config(target, draft, draft_vocab=vocab, draft_tree="3,2,1")))
    vocabulary = drafter_of(engine, kind).vocabulary
    assert vocabulary is not None and len(vocabulary.token_ids) == (64 if vocab == "auto" else 100)
    jobs = jobs_of(4096, (9, 30, 17), 30)
    assert_same(plain(load_decoder(target), jobs), run(engine, jobs))


@pytest.mark.parametrize("vocab", ["auto", "100"])
@pytest.mark.parametrize("kind", ["eagle3", "draft_model"])
def test_steps_recorded_whole_draft_fewer(few, kind, vocab) -> None:
    """Of texts that say other things all are drafted, in parts; what is said joins the list after steps of both."""
    target, draft = BUNDLED / "target", f"{kind}:{BUNDLED / kind.removesuffix('_model')}"
    engine = build_engine(config(target, draft, draft_vocab=vocab, draft_tokens=2, max_seqs=1))
    jobs = jobs_of(4096, (9, 30, 17), 40)
    texts = run_freely(engine, jobs)
    assert_same(plain(load_decoder(target), jobs), texts)
    assert isinstance(engine.runner, GraphStepRunner) and engine.runner.counts["launched"] > 4
    vocabulary = drafter_of(engine, kind).vocabulary
    assert vocabulary is not None and set(texts[jobs[-1].id].tokens) <= set(vocabulary.token_ids.tolist())


# -- the setting -------------------------------------------------------------------------------------------------------


def test_how_many_are_drafted() -> None:
    sizes = {auto: parameters.drafted(auto, "auto") for auto in (32_000, 65_535, 65_536, 151_936)}
    assert sizes == {32_000: 32_000, 65_535: 65_535, 65_536: 32_768, 151_936: 32_768}
    assert [parameters.drafted(151_936, each) for each in ("full", "8192", "999999")] == [151_936, 8_192, 151_936]


def test_a_number_for_what_drafts_none_or_only_all_is_refused(directory) -> None:
    with pytest.raises(ConfigurationError, match=r"--draft-vocab 8192: is for draft models, EAGLE and MTP heads, but"):
        drafts(EngineConfig(draft_vocab="8192"), "ngram")
    model = load_decoder(directory / "target").config
    on_gpu = Linear(torch.empty(150, 64, device="meta"))
    with pytest.raises(ConfigurationError, match=r"--draft-vocab 100: here a drafter has logits of all its 150 tokens"):
        drafted_tokens(on_gpu, "100", model)
    assert drafted_tokens(on_gpu, "full", model) is None and drafted_tokens(on_gpu, "auto", model) is None
