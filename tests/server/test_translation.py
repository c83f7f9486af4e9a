"""Which tokens two vocabularies share, and what is read for the others, with tokenizers of several makes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models, processors

from foresay.server.engine.vocabulary import LEAST_SHARE, SMALL_SHARE, TokenTable, Translation, translation
from foresay.server.settings.resolved import CannotRun
from foresay.server.text.tokenizer import Spelling
from foresay.verifier.model.config import ModelConfig
from tests.same_tokens.test_directories import write_tokenizer
from tests.same_tokens.vocabularies import write_sentencepiece
from tests.verifier.families import make

#: The model's embedding is larger than its tokenizer's vocabulary.
ROWS = 340


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    directory = tmp_path_factory.mktemp("model")
    make("llama2", directory, vocab_size=ROWS, num_hidden_layers=1)
    return ModelConfig.from_directory(directory)


def with_ends(model: ModelConfig, *ends: int) -> ModelConfig:
    return replace(model, eos_token_ids=ends)


def folder(root: Path, name: str) -> Path:
    (root / name).mkdir()
    return root / name


def byte_level(root: Path, *marks: str, name: str = "byte_level") -> Path:
    """A byte-level BPE of 290 tokens, and these special ones."""
    directory = folder(root, name)
    write_tokenizer(directory, 290)
    backend = Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.add_special_tokens(list(marks))
    backend.save(str(directory / "tokenizer.json"))
    return directory


def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def between(target: Path, draft: Path, ours: ModelConfig, theirs: ModelConfig) -> Translation:
    made = translation("draft", target, ours, draft, theirs)
    assert made is not None
    return made


@pytest.mark.parametrize("turned", [False, True])
def test_tokens_are_paired_if_and_only_if_their_bytes_are_the_same(tmp_path, model, turned) -> None:
    first, second = byte_level(tmp_path), folder(tmp_path, "sentencepiece")
    write_sentencepiece(second, 310)
    model = with_ends(model)
    if turned:
        first, second = second, first
    made, sizes = between(first, second, model, model), [tokenizer(one).get_vocab_size() for one in (first, second)]
    ours, theirs = Spelling(tokenizer(first)), Spelling(tokenizer(second))
    pairs = list(zip(made.token_ids.tolist(), made.columns.tolist(), strict=True))
    assert all(ours.raw(id) == theirs.raw(own) for id, own in pairs)
    assert made.token_ids.tolist() == sorted(set(made.token_ids.tolist()))
    assert len(set(made.columns.tolist())) == len(pairs)
    known = [{s.raw(id) for id in range(size)} for s, size in zip((ours, theirs), sizes, strict=True)]
    assert {ours.raw(id) for id, _ in pairs} == known[0] & known[1]
    assert made.tokens == sizes[0]
    assert made.share > 0.8
    for id, own in pairs:
        assert made.read[id] == own


def test_spaces_and_bytes_are_one_thing_however_they_are_spelled(tmp_path, model) -> None:
    target, draft = byte_level(tmp_path), folder(tmp_path, "sentencepiece")
    write_sentencepiece(draft, 310)
    made, ours, theirs = between(target, draft, model, model), tokenizer(target), tokenizer(draft)
    for spelled, other in {"Ġthe": "▁the", "Ċ": "<0x0A>", "Ġ": "▁", "a": "a", "Ã": "<0xC3>"}.items():
        assert made.read[ours.token_to_id(spelled)] == theirs.token_to_id(other)
        assert ours.token_to_id(spelled) in made.token_ids
    assert theirs.token_to_id("<0x61>") not in made.columns  # nobody writes an "a" like that


def test_what_the_draft_model_does_not_have_is_read_as_what_it_ends_with(tmp_path, model) -> None:
    target, draft = byte_level(tmp_path), folder(tmp_path, "short")
    write_tokenizer(draft, 262)
    made, ours, theirs = between(target, draft, model, model), tokenizer(target), tokenizer(draft)
    assert theirs.token_to_id("Ġfox") is None
    assert theirs.token_to_id("he") is not None
    texts = {Spelling(theirs).raw(id): id for id in range(262)}
    unknown = [id for id in range(290) if id not in made.token_ids]
    assert len(unknown) == 28
    for id in unknown:
        text = Spelling(ours).raw(id)
        endings = [text[start:] for start in range(len(text)) if text[start:] in texts]
        assert made.read[id] == texts[max(endings, key=len)]


def test_padding_is_read_as_the_end_of_text(tmp_path, model) -> None:
    target, draft = byte_level(tmp_path, "<|end|>"), byte_level(tmp_path, "<eos>", "<more>", name="draft")
    ours, theirs = with_ends(model, 290), with_ends(model, 290)
    made = between(target, draft, ours, theirs)
    assert len(made.read) == ROWS
    assert set(made.read[291:].tolist()) == {290}


def test_ends_of_text_are_one_thing_and_special_tokens_go_by_name(tmp_path, model) -> None:
    target = byte_level(tmp_path, "<|end|>", "<|over|>", "<|user|>", "<|pad|>")  # 290 to 293
    draft = byte_level(tmp_path, "<|pad|>", "</s>", "<|over|>", "<|user|>", name="draft")
    made = between(target, draft, with_ends(model, 290, 291), with_ends(model, 291, 292))
    assert made.read[290:294].tolist() == [291, 292, 293, 290]
    assert {290, 291, 292, 293} <= set(made.token_ids.tolist())
    assert made.share == 1.0


def test_what_ends_a_text_in_one_model_alone_is_not_the_same_thing(tmp_path, model) -> None:
    target = byte_level(tmp_path, "<|end|>", "<|pad|>")
    draft = byte_level(tmp_path, "<|pad|>", "<|end|>", name="draft")
    made = between(target, draft, with_ends(model, 290), with_ends(model, 290))
    assert made.read[290] == 290, "the ends go together, though the draft model has another token of that name"
    assert 291 not in made.token_ids
    assert made.token_ids.tolist() == list(range(291))


def test_the_tokenizers_own_end_of_text_comes_first(tmp_path, model) -> None:
    target = byte_level(tmp_path, "<|end|>")
    draft = byte_level(tmp_path, "<text>", "<turn>", name="draft")
    for named in ("<turn>", {"content": "<turn>", "special": True}):
        (draft / "tokenizer_config.json").write_text(json.dumps({"eos_token": named}))
        made = between(target, draft, with_ends(model, 290), with_ends(model, 290, 291))
        assert made.read[290] == 291
    (draft / "tokenizer_config.json").write_text("no JSON")
    assert between(target, draft, with_ends(model, 290), with_ends(model, 290, 291)).read[290] == 290


def begun(directory: Path, mark: str) -> Path:
    """The tokenizer puts this special token in front of a text."""
    backend = tokenizer(directory)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{mark} $A", special_tokens=[(mark, backend.token_to_id(mark))]
    )
    backend.save(str(directory / "tokenizer.json"))
    return directory


def test_the_beginning_of_a_text_is_read_as_the_draft_models_own(tmp_path, model) -> None:
    target = begun(byte_level(tmp_path, "<begin>", "<end>"), "<begin>")
    draft = begun(byte_level(tmp_path, "<end>", "<s>", name="draft"), "<s>")
    made = between(target, draft, with_ends(model, 291), with_ends(model, 290))
    assert made.read[290:292].tolist() == [291, 290]
    assert 290 not in made.token_ids, "nobody writes it"
    without = byte_level(tmp_path, "<end>", "<other>", name="without")
    assert between(target, without, with_ends(model, 291), with_ends(model, 290)).read[290] == 290


def test_a_token_of_the_draft_model_is_one_token_of_the_target(tmp_path, model) -> None:
    """Of two with the same bytes the one that is written: not the stray byte, not one added as ordinary text later."""
    target = folder(tmp_path, "target")
    backend = write_sentencepiece(target, 310)
    backend.add_tokens([AddedToken("the")])
    backend.save(str(target / "tokenizer.json"))
    draft = byte_level(tmp_path)
    model = with_ends(model)
    made = between(target, draft, model, model)
    assert made.read[backend.token_to_id("<0x61>")] == made.read[backend.token_to_id("a")]
    assert backend.token_to_id("<0x61>") not in made.token_ids
    assert backend.token_to_id("a") in made.token_ids


def test_equal_and_unknown_vocabularies_need_no_translation(tmp_path, model) -> None:
    target, same, nothing = byte_level(tmp_path), byte_level(tmp_path, name="same"), folder(tmp_path, "nothing")
    assert translation("draft", target, model, same, model) is None
    assert translation("draft", target, model, nothing, model) is None


def test_ids_beyond_the_models_own_rows_are_never_used(tmp_path, model) -> None:
    target, draft = byte_level(tmp_path), byte_level(tmp_path, "<new>", name="draft")
    made = between(target, draft, model, replace(model, vocab_size=270))
    assert int(made.read.max()) < 270
    assert int(made.columns.max()) < 270
    assert len(made.token_ids) == 270


@pytest.mark.parametrize(("letters", "enough"), [("zqxjkvbwygfp", False), ("abcdefghilmnoprstuy", True)])
def test_what_hardly_says_a_text_is_refused(tmp_path, model, letters, enough) -> None:
    """How many of all tokens are shared says little: the frequent letters are half of a text."""
    target, draft = byte_level(tmp_path), folder(tmp_path, "draft")
    Tokenizer(models.WordLevel({text: id for id, text in enumerate(letters)}, unk_token=letters[0])).save(
        str(draft / "tokenizer.json")
    )
    if enough:
        made = between(target, draft, model, model)
        assert len(made.token_ids) == len(letters) and SMALL_SHARE > made.share >= LEAST_SHARE
        return
    with pytest.raises(
        CannotRun, match=r"--draft small has .*: it knows only 12 of the target's 290 tokens, "
    ) as raised:
        translation("small", target, model, draft, model)
    assert "a draft model of the target's family" in raised.value.hint and "--anyway" in raised.value.hint
    anyway = translation("small", target, model, draft, model, anyway=True)
    assert anyway is not None and anyway.share < LEAST_SHARE


def test_a_lexicon_counts_a_token_once(tmp_path, model) -> None:
    directory = byte_level(tmp_path, "<|end|>")
    token_table = TokenTable.of(tokenizer(directory), directory, with_ends(model, 290, 335))
    assert (len(token_table), token_table.ends, token_table.begin) == (291, (290,), None)


def test_what_a_draft_models_tokenizer_puts_first_may_be_no_token_of_it(model, tmp_path) -> None:
    draft = byte_level(tmp_path, *(f"<|{number}|>" for number in range(60)))
    backend = tokenizer(draft)
    begun = backend.token_to_id("<|59|>")
    assert begun is not None
    assert begun >= ROWS
    backend.post_processor = processors.TemplateProcessing(single="<|59|> $A", special_tokens=[("<|59|>", begun)])
    backend.save(str(draft / "tokenizer.json"))
    token_table = TokenTable.of(tokenizer(draft), draft, model)
    assert token_table.begin is None
