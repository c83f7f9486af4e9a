"""Tokenizers of GGUF files: the ids of the tokenizers that they were made of."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from tokenizers.normalizers import NFC, Replace
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import GemmaTokenizer

from foresay.server.catalog.hub import resolve
from foresay.server.settings.resolved import BUNDLED
from foresay.server.text.tokenizer import Tokenizer
from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.errors import ConfigError
from foresay.verifier.model.gguf.config import end_tokens
from foresay.verifier.model.gguf.directory import SPLITTINGS, tokenizer_of
from foresay.verifier.model.gguf.file import GgufFile
from tests.verifier.gguf_files import letters, tokens_of, write, writer_of

TEXTS = [
    "Hello world! It's 1999, they'LL pay $12345.67  for it.\n\n\tdef f(x):\n        return x**2 \r\n ",
    "Ünïcödé e\u0301 naïve 你好，世界 こんにちは 🙂‍↔️ ١٢٣ Ⅷ",
    "  leading   spaces\n \n  and <|end|> tags <|user|>x<tool_call>y</tool_call>",
    "",
]


def random_texts(count: int = 60) -> list[str]:
    rng = random.Random(3)
    letters = "ab zZ09 ,.'\n\r\t  é你🙂ſKǅ_-/"
    return ["".join(rng.choice(letters) for _ in range(rng.randrange(1, 40))) for _ in range(count)]


def made_of(tmp_path: Path, tokens: dict[str, Any], template: str | None = None) -> Path:
    """The directory made of a file that has these keys."""
    writer = writer_of(tmp_path / "x.gguf", ModelConfig.from_directory(BUNDLED / "target"), tokens)
    if template:
        writer.add_chat_template(template)
    import numpy as np

    writer.add_tensor("token_embd.weight", np.zeros((len(tokens["tokenizer.ggml.tokens"]), 256), np.float16))
    write(writer)
    return resolve(tmp_path / "x.gguf")


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def assert_same_ids(directory: Path, original: Tokenizer) -> None:
    made = Tokenizer.load(directory)
    for text in (*TEXTS, *random_texts()):
        ids = original.encode(text)
        assert made.encode(text) == ids
        assert made.encode(text, add_special_tokens=False) == original.encode(text, add_special_tokens=False)
        for skip in (True, False):
            assert made.decode(ids, skip) == original.decode(ids, skip)
    assert made.special_ids == original.special_ids


#: Control tokens of Gemma 4 that llama.cpp's converter makes the user's.
SHOWN = ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>']


def gemma4() -> tuple[Tokenizer, dict[str, Any]]:
    """A tokenizer as Gemma 4's are, made by transformers' class, and the keys that the converter makes of it."""
    control = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *SHOWN, "<|turn>", "<turn|>"]
    backend = Backend(BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = Replace(" ", "▁")
    raw = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = BpeTrainer(vocab_size=600, special_tokens=[*control, *raw], show_progress=False)
    backend.train_from_iterator([*TEXTS[:2], "the\n\nweather\n\n\nin Paris is   sunny and warm"] * 9, trainer)
    model = json.loads(backend.to_str())["model"]
    merges: list[Any] = [tuple(merge) for merge in model["merges"]]
    made = GemmaTokenizer(vocab=model["vocab"], merges=merges)
    made.add_special_tokens({"additional_special_tokens": control[5:]})
    made.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    names = sorted(model["vocab"], key=model["vocab"].__getitem__)
    kinds = {**dict.fromkeys(control, 3), **dict.fromkeys(SHOWN, 4), **dict.fromkeys(raw, 6)}
    return Tokenizer(made), {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.scores": [0.0] * len(names),
        "tokenizer.ggml.token_type": [kinds.get(name, 1) for name in names],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": True,
    }


def test_gemma_4_s_tokenizer(tmp_path) -> None:
    """The converter makes ordinary tokens of some control tokens; here they are control tokens, and end texts."""
    original, tokens = gemma4()
    made = made_of(tmp_path, tokens)
    assert_same_ids(made, original)
    read = Tokenizer.load(made)
    text = 'x<|tool_call>call:f{a:<|"|>b c<|"|>}<tool_call|><turn|>\n\n\n'
    assert read.encode(text) == original.encode(text)
    assert {read.special_id(tag) for tag in SHOWN} == {tokens["tokenizer.ggml.tokens"].index(tag) for tag in SHOWN}
    named = [tokens["tokenizer.ggml.tokens"].index(end) for end in ("<|tool_response>", "<turn|>")]
    assert ModelConfig.from_directory(made).eos_token_ids == (1, *named)
    without = GgufFile(tmp_path / "x.gguf", {name: value for name, value in tokens.items() if "merges" not in name}, {})
    with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.merges is missing"):
        tokenizer_of(without)


def test_the_bundled_tokenizer(tmp_path) -> None:
    directory = BUNDLED / "target"
    original = Tokenizer.load(directory)
    made = made_of(tmp_path, tokens_of(directory, "gpt-2"), original.template)
    assert_same_ids(made, original)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What <|end|> now?"}]
    assert Tokenizer.load(made).render(messages).text == original.render(messages).text
    assert ModelConfig.from_directory(made).eos_token_ids == (0, 1)


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def trained(directory: Path, pre: str) -> Tokenizer:
    """A tokenizer as the families' own, of a few merges."""
    backend = Backend(BPE(ignore_merges=pre == "llama-bpe"))
    plain = ByteLevel(add_prefix_space=False, use_regex=False)
    pattern = LLAMA3 if pre == "llama-bpe" else LLAMA3.replace("{1,3}", "")
    of_gpt2 = ByteLevel(add_prefix_space=False, use_regex=True)
    split = Sequence([Split(__import__("tokenizers").Regex(pattern), "isolated"), plain])
    backend.pre_tokenizer = {"gpt-2": of_gpt2, "smollm": Sequence([Digits(individual_digits=True), of_gpt2])}.get(
        pre, split
    )
    if pre == "qwen2":
        backend.normalizer = NFC()
    from tokenizers.decoders import ByteLevel as Decoder

    backend.decoder = Decoder()
    trainer = BpeTrainer(vocab_size=400, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    backend.train_from_iterator([*TEXTS, *random_texts(400)], trainer)
    backend.add_special_tokens(["<|endoftext|>", "<|user|>"])
    backend.add_tokens(["<tool_call>", "</tool_call>"])
    backend.save(str(directory / "tokenizer.json"))
    values = json.loads((directory / "tokenizer.json").read_text("utf-8"))
    for each in values["added_tokens"]:
        each["normalized"] = False
    (directory / "tokenizer.json").write_text(json.dumps(values), "utf-8")
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(about))
    return Tokenizer.load(directory)


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "smollm", "gpt-2"])
def test_bpe_of_bytes(tmp_path, pre) -> None:
    (tmp_path / "original").mkdir()
    original = trained(tmp_path / "original", pre)
    tokens = tokens_of(tmp_path / "original", pre)
    tokens["tokenizer.ggml.tokens"].append(f"[PAD{len(tokens['tokenizer.ggml.tokens'])}]")
    tokens["tokenizer.ggml.token_type"].append(5)
    assert_same_ids(made_of(tmp_path, tokens), original)


def test_a_begin_token(tmp_path) -> None:
    """By what metadata says; where it says nothing Llama 3's tokenizers have one."""
    (tmp_path / "original").mkdir()
    original = trained(tmp_path / "original", "llama-bpe")
    tokens = tokens_of(tmp_path / "original", "llama-bpe")
    plain, begin = original.encode("Hello"), tokens["tokenizer.ggml.tokens"].index("<|user|>")
    tokens["tokenizer.ggml.bos_token_id"] = begin
    for says, expected in ((None, [begin, *plain]), (True, [begin, *plain]), (False, plain)):
        more = {} if says is None else {"tokenizer.ggml.add_bos_token": says}
        assert Tokenizer.load(made_of(tmp_path, tokens | more)).encode("Hello") == expected


def printed(*directories: Path) -> list[str]:
    """What transformers says while each of these tokenizers is loaded."""
    load = """
import sys, pathlib
from foresay.server.engine_process.child import import_tokenizers
from foresay.server.text.tokenizer import Tokenizer
import_tokenizers("AutoTokenizer")
for directory in sys.argv[1:]:
    Tokenizer.load(pathlib.Path(directory))
    print("|", file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", load, *directories], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    return done.stderr.split("|\n")[:-1]


def test_nothing_is_printed_about_a_large_vocabulary(tmp_path) -> None:
    """transformers takes all for a Mistral's that have no model_type, and warns of the one that was published wrong: it
    may stand beside a file of a Mistral's."""
    tokens = letters(100_001) | {"tokenizer.ggml.pre": "smollm"}
    tokens["tokenizer.ggml.tokens"][-2:] = ["t", "1"]  # which are merged
    alone = made_of(tmp_path, tokens)
    shutil.copy(alone / "tokenizer.json", tmp_path)
    beside = resolve(tmp_path / "x.gguf")
    (tmp_path / "x.gguf").write_bytes((tmp_path / "x.gguf").read_bytes().replace(b"smollm", b"tekken"))
    *quiet, warned = printed(alone, beside, resolve(tmp_path / "x.gguf"))
    assert quiet == ["", ""] and "incorrect regex pattern" in warned


PIECES = ["▁", "a", "b", "c", "ab", "abc", "bc", "▁a", "▁ab", "ca", "é"]
SCORES = [-9.0, -8.0, -8.5, -8.7, -1.0, -3.0, -2.0, -4.0, -5.0, -1.5, -7.0]


def by_score(text: str) -> list[str]:
    """SentencePiece's way: the pair with the best score is merged, the leftmost of equals, until there is none."""
    scores = dict(zip(PIECES, SCORES, strict=True))
    parts = list("▁" + text.replace(" ", "▁"))
    while pairs := [(-scores[a + b], at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in scores]:
        at = min(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def sentencepiece() -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + SCORES,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(PIECES)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def test_bpe_by_score(tmp_path) -> None:
    tokens = sentencepiece()
    made = Tokenizer.load(made_of(tmp_path, tokens))
    ids, rng = {token: index for index, token in enumerate(tokens["tokenizer.ggml.tokens"])}, random.Random(5)
    for _ in range(300):
        text = "".join(rng.choice("abc é") for _ in range(rng.randrange(1, 14)))
        assert made.encode(text) == [1, *(ids[part] for part in by_score(text))]
        assert made.decode(made.encode(text)) == text
    assert made.encode("xa")[1:] == [ids["▁"], ids["<0x78>"], ids["a"]]
    assert made.decode(made.encode("a你🙂")) == "a你🙂"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokenizer.ggml.pre": "whisper"}, "tokenizer.ggml.pre 'whisper' .*put the tokenizer.json .*beside it.*qwen2"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model 'bert' is not supported"),
        ({"tokenizer.ggml.tokens": ["a"]}, "token_type must have a number for each of 1 tokens"),
    ],
)
def test_what_is_not_known_is_refused(tmp_path, changes, words) -> None:
    with pytest.raises(ConfigError, match=words):
        made_of(tmp_path, tokens_of(BUNDLED / "target", "gpt-2") | changes)


def test_a_tokenizer_next_to_the_file_is_taken(tmp_path) -> None:
    tokens = tokens_of(BUNDLED / "target", "whisper")
    (tmp_path / "tokenizer.json").write_bytes((BUNDLED / "target" / "tokenizer.json").read_bytes())
    assert_same_ids(made_of(tmp_path, tokens), Tokenizer.load(BUNDLED / "target"))
    (tmp_path / "there").mkdir()
    (tmp_path / "x.gguf").rename(tmp_path / "there" / "blob")
    (tmp_path / "x.gguf").symlink_to(tmp_path / "there" / "blob")
    assert_same_ids(resolve(tmp_path / "x.gguf"), Tokenizer.load(BUNDLED / "target"))
    (tmp_path / "x.gguf").unlink()
    tokens["tokenizer.ggml.tokens"][700:702] = reversed(tokens["tokenizer.ggml.tokens"][700:702])
    with pytest.raises(ConfigError, match="is not the tokenizer of"):
        made_of(tmp_path, tokens)


def test_a_file_is_made_a_directory_without_torch(tmp_path) -> None:
    """By the server's process, which has none."""
    made = made_of(tmp_path, tokens_of(BUNDLED / "target", "gpt-2"))
    shutil.rmtree(made)
    code = (
        f"import sys; from foresay.server.catalog.hub import resolve; made = resolve({str(tmp_path / 'x.gguf')!r});"
        "from foresay.verifier.model.config import ModelConfig; ModelConfig.from_directory(made);"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (made / "tokenizer.json").exists()


def test_of_gpt_oss_a_message_ends_no_text(tmp_path) -> None:
    made_of(tmp_path, tokens_of(BUNDLED / "target", "gpt-2"))
    about = GgufFile.read(tmp_path / "x.gguf").metadata
    tokens, types = (list(about[f"tokenizer.ggml.{key}"]) for key in ("tokens", "token_type"))
    tokens[5:8], types[5:8] = ["<|return|>", "<|call|>", "<|end|>"], [3, 3, 3]

    def ends() -> set[int]:
        own = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
        return {5, 6, 7} & set(end_tokens(GgufFile(tmp_path, own, {})))

    assert ends() == {5, 6}
    tokens[6] = "call"
    assert ends() == {5, 7}


@pytest.mark.parametrize(
    ("pre", "pieces"),
    {
        "glm4": "It|'s| |123|4| 日本語です|。\r\n| K|_a| Straße|1|\t|\t|!?|  ",
        "deepseek-llm": "It|'|s| |1|2|3|4| |日本語です|。|\r|\n| K|_|a| Stra|ß|e|1|\t|\t!?|  ",
        "deepseek-coder": "It|'|s| |1|2|3|4| |日本語です|。|\r|\n| K|_|a| Straße|1|\t|\t!?|  ",
        "deepseek-v3": "It|'s| |123|4| |日本語です|。\r\n| K|_a| Straße|1|\t|\t|!?|  ",
    }.items(),
)
def test_pieces(pre, pieces) -> None:
    steps = {"type": "Sequence", "pretokenizers": SPLITTINGS[pre].steps()[:-1]}
    backend = Backend.from_str(json.dumps({**json.loads(Backend(BPE()).to_str()), "pre_tokenizer": steps}))
    found = backend.pre_tokenizer.pre_tokenize_str(pieces.replace("|", ""))
    assert "|".join(piece for piece, _ in found) == pieces


def test_all_ways_of_splitting_are_read_by_the_library(tmp_path) -> None:
    made_of(tmp_path, tokens_of(BUNDLED / "target", "gpt-2"))
    file = GgufFile.read(tmp_path / "x.gguf")
    for pre in SPLITTINGS:
        file.metadata["tokenizer.ggml.pre"] = pre  # type: ignore[index]
        values = tokenizer_of(file)
        assert Backend.from_str(json.dumps(values)).encode("It's 12 a").ids
