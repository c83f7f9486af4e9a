"""The same tokens with draft models of another vocabulary, and the same drafts as a draft model that shares it."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from foresay.drafters.draft_model import DraftModelDrafter
from foresay.kvpaging import PagePool, PageTable
from foresay.server.engine.build import build_engine
from foresay.server.settings.config import EngineConfig
from foresay.server.settings.resolved import BUNDLED
from foresay.server.text.tokenizer import Spelling
from foresay.spec.errors import ConfigurationError
from foresay.spec.tree import TreeShape
from tests.drafters.test_draft_model import running
from tests.same_tokens import options
from tests.same_tokens.models import MakeDrafter, Pair, engine_of, make_pair, paged
from tests.same_tokens.runs import assert_same, drafting, jobs_of, plain, replace_params, shape_of, whole
from tests.same_tokens.test_directories import config, witnessed, write_tokenizer
from tests.same_tokens.vocabularies import (
    Noted,
    Translated,
    order_without,
    renumbered,
    with_columns,
    write_marked,
    write_sentencepiece,
)
from tests.same_tokens.witness import Job, Text, run
from tests.verifier.families import make
from tests.verifier.reading import Reader, load_decoder, random_tokens

VOCAB = 300
#: The end-of-text token of the random models.
END = 2
DRAFTERS = ["chain4", "3,2,1", "4,4,2,2,1"]


@pytest.fixture(scope="module")
def same(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A target and a draft model with one tokenizer."""
    made = make_pair("smollm", tmp_path_factory.mktemp("same"), torch.float32, vocab_size=VOCAB, num_hidden_layers=2)
    write_marked(made.directory, VOCAB)
    write_marked(made.draft_directory, VOCAB)
    return made


@pytest.fixture(scope="module")
def other(same, tmp_path_factory: pytest.TempPathFactory) -> Callable[[float], Translated]:
    """The same draft model with a vocabulary in another order, in which a share of the tokens is missing."""

    @cache
    def made(gone: float) -> Translated:
        directory = tmp_path_factory.mktemp("other") / "draft"
        return Translated.of(same, renumbered(same.draft_directory, directory, order_without(VOCAB, gone, [END])))

    return made


def jobs(max_tokens: int = 16) -> list[Job]:
    return jobs_of(VOCAB, (9, 33, 1, 17, 20, 5), max_tokens)


@pytest.mark.parametrize(
    ("drafter", "gone", "least"), [("chain4", 0.0, 0.3), *((drafter, 0.3, 0.01) for drafter in DRAFTERS)]
)
def test_the_same_tokens_and_some_drafts_right(same, other, drafter, gone, least) -> None:
    """To a random model every token that stands in for another is a wrong one, so few drafts are right then."""
    expected = plain(same.target, jobs())
    texts = run(drafting(other(gone), drafter, whole(jobs(), expected)), jobs())
    assert_same(expected, texts)
    statistics = [text.statistics for text in texts.values() if text.statistics]
    assert sum(each.accepted for each in statistics) > least * sum(each.steps for each in statistics)


def proposed(pair: Pair, make: MakeDrafter, drafter: str) -> list[tuple[str, list[int], list[int]]]:
    """Every tree of a run, one request at a time."""

    def noted(pool: PagePool) -> Noted:
        inner = make(pool)
        assert inner is not None
        return Noted(inner)

    engine = engine_of(pair.target, noted, shape_of(drafter), max_seqs=1)
    run(engine, jobs())
    assert isinstance(engine.drafter, Noted)
    assert sum(len(tokens) - 1 for _, tokens, _ in engine.drafter.trees) > 100
    return engine.drafter.trees


@pytest.mark.parametrize("drafter", ["chain4", "4,4,2,2,1"])
def test_a_vocabulary_in_another_order_gives_the_very_same_drafts(same, other, drafter) -> None:
    """At every temperature."""
    permuted = other(0.0)
    assert permuted.translation.share == 1.0
    assert permuted.translation.columns.tolist() != list(range(VOCAB))
    ours = proposed(same, permuted.draft_model, drafter)
    assert ours == proposed(same, same.draft_model, drafter)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_is_its_own_draw_with_the_noise_of_the_targets_tokens(same, other, temperature) -> None:
    """Computed here in the draft model's own ids, from its checkpoint as it is."""
    fewer, pool = other(0.3), PagePool(32, 16)
    made, reader = fewer.translation, Reader(load_decoder(fewer.draft_directory))
    tokens = random_tokens(random.Random(1), 20, VOCAB)
    table = PageTable(pool)
    table.reserve(24)
    table.commit(19)
    sequence = running(same, tokens, table, temperature)
    (tree,) = fewer.draft_model(pool).propose([sequence], [TreeShape.chain(3)])
    own, expected = made.read[torch.tensor(tokens)].tolist(), []
    for position in range(20, 23):
        noise = sequence.noise.row(position)[made.token_ids] * temperature
        best = int((reader.alone(own)[-1][made.columns] + noise).argmax())
        own.append(int(made.columns[best]))
        expected.append(int(made.token_ids[best]))
    assert tree.tokens[1:] == expected
    assert not torch.equal(made.token_ids, torch.arange(len(made.token_ids)))


@pytest.mark.parametrize("drafter", ["chain4", "4,4,2,2,1"])
def test_a_smaller_vocabulary_drafts_like_the_same_model_restricted_to_it(same, other, drafter) -> None:
    """Restricted: it knows the target's ids, but may only draft some, and reads others as the tokens they end with."""
    fewer = other(0.3)
    tokenizer = Tokenizer.from_file(str(same.directory / "tokenizer.json"))
    spelling = Spelling(tokenizer)
    kept = set(order_without(VOCAB, 0.3, [END]))
    texts = {spelling.raw(id): id for id in sorted(kept)}
    read = [
        id
        if id in kept
        else next((texts[spelling.raw(id)[n:]] for n in range(VOCAB) if spelling.raw(id)[n:] in texts), END)
        for id in range(VOCAB)
    ]
    ids = torch.tensor(sorted(kept))
    restricted = with_columns(same.draft_directory, ids, torch.float32)

    def model(pool: PagePool) -> DraftModelDrafter:
        return DraftModelDrafter(paged(restricted, pool), read=torch.tensor(read), token_ids=ids)

    ours = proposed(same, fewer.draft_model, drafter)
    assert ours == proposed(same, model, drafter)


@pytest.mark.parametrize("drafter", ["chain4", "4,4,2,2,1"])
def test_every_option(same, other, drafter) -> None:
    """Penalties, bias, bans and grammars change the drafts by the target's ids too."""
    groups = options.jobs(VOCAB, 16)
    mine = options.arriving([groups[name] for where in ("alone", "together") for name in options.of(drafter, where)])
    expected = plain(same.target, mine)
    texts = run(drafting(other(0.3), drafter, whole(mine, expected), chunk=11, prefix=True), mine)
    assert_same(expected, texts)
    assert sum(text.statistics.accepted for text in texts.values() if text.statistics) > 0


def test_nothing_is_drafted_that_is_not_allowed(same, other) -> None:
    """Neither what is banned, nor what the draft model does not know."""
    allowed = list(range(0, VOCAB, 3))
    limits = {"allowed_token_ids": tuple(allowed), "ignore_eos": True}
    wanted = [replace(job, params=replace_params(job.params, **limits)) for job in jobs()]
    noted: list[Noted] = []

    def drafter(pool: PagePool) -> Noted:
        noted.append(Noted(other(0.3).draft_model(pool)))
        return noted[0]

    run(engine_of(same.target, drafter, shape_of("4,4,2,2,1")), wanted)
    drafted = {token for _, tokens, _ in noted[0].trees for token in tokens[1:]}
    assert drafted <= set(allowed) & set(other(0.3).translation.token_ids.tolist())
    assert len(drafted) > 20


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level target of 300 ids, 290 of them tokens, and a draft model like Llama 2's with 320, 300 of them."""
    root = tmp_path_factory.mktemp("strangers")
    make("llama3", root / "target", num_hidden_layers=2)
    write_tokenizer(root / "target", 290)
    make("llama2", root / "draft", vocab_size=320, num_hidden_layers=1)
    write_sentencepiece(root / "draft", 300)
    return root


@pytest.mark.parametrize("changes", [{"draft_tokens": 5}, {"draft_tree": "4,4,2,2,1"}])
def test_an_engine_of_strangers(strangers, changes) -> None:
    """Random models, so hardly a draft is right; the prompts have ids that neither tokenizer has."""
    listed = jobs_of(300, (9, 70, 33, 1, 20, 40), 20)
    engine = witnessed(build_engine(config(strangers / "target", str(strangers / "draft"), **changes)))
    assert engine.info.exact, engine.info.exact_reason
    reason = "asked for, knows 269 of the target's 290 tokens, 99% of a text"
    assert engine.info.drafter_reason == reason
    assert engine.info.warnings == ()
    bare = witnessed(build_engine(config(strangers / "target", "none")))
    expected = {job.id: run(bare, [job])[job.id] for job in listed}
    assert_same(expected, run(engine, listed))
    again = [replace(job, id=f"{job.id}-again") for job in listed]
    assert_same({job.id: expected[job.id.removesuffix("-again")] for job in again}, run(engine, again))


def test_too_little_in_common_is_refused(strangers, tmp_path) -> None:
    make("llama2", tmp_path, num_hidden_layers=1)
    write_characters(tmp_path, "0123456789")
    with pytest.raises(ConfigurationError, match=r"knows only 10 of the target's 290 tokens, .*--anyway to try it"):
        build_engine(config(strangers / "target", str(tmp_path)))
    assert build_engine(config(strangers / "target", str(tmp_path), anyway=True)).info.warnings
    write_characters(tmp_path, "ÄÖ")
    with pytest.raises(ConfigurationError, match=r"knows only 0 of"):
        build_engine(config(strangers / "target", str(tmp_path), anyway=True))


def test_little_in_common_is_reported_before_anything_is_loaded(strangers, tmp_path) -> None:
    """These letters are three quarters of a text, with hardly a tenth of all tokens."""
    make("llama2", tmp_path, num_hidden_layers=1)
    write_characters(tmp_path, "abcdefghilmnoprstuy")
    stages: list[str] = []
    engine = build_engine(config(strangers / "target", str(tmp_path)), lambda stage, share=None: stages.append(stage))
    (warning,) = engine.info.warnings
    assert re.fullmatch(
        rf"--draft {tmp_path} has another vocabulary: it knows only 19 of the target's 290 tokens, [5-8]\d% of a text, "
        "and drafts no others; name a draft model of the target's family, or --draft suffix, which needs none",
        warning,
    )
    assert stages[:2] == ["finding the models", f"warning: {warning}"]


def write_characters(directory: Path, characters: str) -> None:
    """A tokenizer that knows nothing but these."""
    known = WordLevel({character: id for id, character in enumerate(characters)}, unk_token=characters[0])
    Tokenizer(known).save(str(directory / "tokenizer.json"))


@pytest.fixture(scope="module")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Text]]:
    """Texts by the bundled target, with no drafter, its own draft model, or that one with its ids in another order."""
    tokenizer = Tokenizer.from_file(str(BUNDLED / "target" / "tokenizer.json"))
    texts = ["Once upon a time there was a little", "<|user|>Tom has 3 apples and buys 4 more.<|end|><|assistant|>"]
    prompts = [tokenizer.encode(text).ids for text in texts]
    listed = [replace(job, prompt=prompts[n % 2]) for n, job in enumerate(jobs_of(4096, (1, 1, 1, 1), 60))]

    @cache
    def written(drafter: str) -> dict[str, Text]:
        draft = drafter if drafter == "none" else str(BUNDLED / "draft")
        if drafter == "permuted":
            order = order_without(4096, 0.0, [])
            draft = str(renumbered(BUNDLED / "draft", tmp_path_factory.mktemp("bundled") / "draft", order))
        settings = EngineConfig(draft=draft, draft_tokens=4, kv_tokens=640, max_model_len=256, threads=1)
        engine = build_engine(settings)
        assert ("100%" in engine.info.drafter_reason) == (drafter == "permuted")
        return run(witnessed(engine), listed)

    return written


def test_the_bundled_draft_with_other_ids_is_right_as_often(bundled) -> None:
    assert_same(bundled("none"), bundled("permuted"))
    ours, theirs = ([text.statistics for text in bundled(name).values()] for name in ("permuted", "draft"))
    assert [one.per_step_accepted for one in ours if one] == [one.per_step_accepted for one in theirs if one]
    assert sum(one.accepted for one in ours if one) > 50
