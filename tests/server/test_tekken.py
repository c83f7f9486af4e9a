"""A checkpoint whose only tokenizer is Mistral's tekken.json, small and made by hand."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from foresay.server.engine.vocabulary import tokenizer
from foresay.server.schemas.chat import Function
from foresay.server.text.conversation import Offer
from foresay.server.text.grammars.answers import tool_call_grammar
from foresay.server.text.grammars.compiler import GrammarCompiler
from foresay.server.text.parsers.chat_format import ChatFormat
from foresay.server.text.tokenizer import Tokenizer
from foresay.verifier.model.errors import ModelError

MERGED = [b"th", b"the", b" the", b"He", b"ll", b"Hell", b"Hello", "é".encode()]
SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"]
#: The last places of the special tokens have no name, and the last tokens of the vocabulary are not used.
ROOM, UNUSED = 12, 3
TEMPLATE = "{{ bos_token }}{% for m in messages %}[INST]{{ m.content }}[/INST]{% endfor %}{# [TOOL_CALLS] [THINK] #}"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokens = [bytes([byte]) for byte in range(256)] + MERGED + [b"unused"] * UNUSED
    place = tmp_path_factory.mktemp("tekken")
    values = {
        "config": {
            "pattern": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            "default_vocab_size": ROOM + 256 + len(MERGED),
            "default_num_special_tokens": ROOM,
            "version": "v13",
        },
        "vocab": [{"rank": rank, "token_bytes": base64.b64encode(one).decode()} for rank, one in enumerate(tokens)],
        "special_tokens": [{"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(SPECIAL)],
    }
    (place / "tekken.json").write_text(json.dumps(values))
    (place / "config.json").write_text(json.dumps({"model_type": "mistral", "vocab_size": ROOM + 256 + len(MERGED)}))
    (place / "chat_template.jinja").write_text(TEMPLATE)
    return place


@pytest.fixture(scope="module")
def loaded(directory: Path) -> Tokenizer:
    return Tokenizer.load(directory)


def test_ids_are_ranks_after_the_special_tokens(loaded: Tokenizer) -> None:
    first = ROOM + 256
    assert loaded.encode("Hello the!") == [1, first + 6, first + 2, ROOM + ord("!")]
    assert loaded.encode("é", add_special_tokens=False) == [first + 7]
    assert loaded.encode("1[INST]x[/INST]", add_special_tokens=False) == [ROOM + ord("1"), 3, ROOM + ord("x"), 4]
    assert loaded.vocab_size == first + len(MERGED)
    assert loaded.special_ids == frozenset(range(ROOM))
    assert loaded.render([{"role": "user", "content": "Hello"}]).text == "<s>[INST]Hello[/INST]"


@settings(max_examples=80)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=20))
@example(text="Hello the theé🦊\n\n  é")
def test_texts_come_back_as_they_were(directory: Path, loaded: Tokenizer, text: str) -> None:
    plain = tokenizer(directory)
    ids = loaded.encode(text, add_special_tokens=False)
    assert loaded.decode(ids) == text
    assert b"".join(loaded.token_bytes(id) for id in ids) == text.encode()
    assert plain is not None and plain.encode(text).ids == ids


def test_the_engine_reads_the_same_vocabulary(directory: Path, loaded: Tokenizer) -> None:
    found = tokenizer(directory)
    assert found is not None and found.get_vocab_size() == ROOM + 256 + len(MERGED)
    style = ChatFormat.of(loaded)
    assert (style.calls, style.thinks) == ("mistral", ("[THINK]", "[/THINK]"))
    compiler = GrammarCompiler.load(directory, loaded.vocab_size, [2])
    assert compiler is not None
    offer = Offer(listed=(Function(name="f"),), functions=(Function(name="f"),), required=True, parallel=False)
    grammar = tool_call_grammar("mistral", offer, {"[TOOL_CALLS]": 5, "[ARGS]": 6})
    matcher = LLMatcher(compiler._tokenizer, grammar.text)
    tokens = loaded.encode("[TOOL_CALLS]f[ARGS]{}", add_special_tokens=False)
    assert matcher.try_consume_tokens(tokens) == len(tokens) == 5
    assert matcher.is_accepting()


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text('{"config": {}}')
    with pytest.raises(ModelError, match=r"tekken\.json: not a complete tokenizer"):
        tokenizer(tmp_path)
    with pytest.raises(ModelError, match="cannot be loaded"):
        Tokenizer.load(tmp_path)
    assert tokenizer(tmp_path / "none") is None
