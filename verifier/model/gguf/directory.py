"""A GGUF file as a model directory: configuration and tokenizer in JSON, the file itself as a link.

It is made once, under ``foresay/gguf`` in the user's cache, keyed by the file's path, size and time, and reused: so any
process that reads model directories can use a GGUF file.

The tokenizer is converted from the file's metadata to tokenizer.json. For tokenizers that split text before they merge,
metadata only names the way of splitting (``tokenizer.ggml.pre``): the rules are defined here for the supported
families. Others are refused, since their ids would differ.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foresay.verifier.model.errors import ConfigError, NoSuchModel
from foresay.verifier.model.fields import Fields
from foresay.verifier.model.gguf.config import config_of, end_tokens, tokens_of
from foresay.verifier.model.gguf.file import LINK, GgufFile, parts_of
from foresay.verifier.ops.kernels.cpu import kernel_cache

_KEY = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_WAY_OUT = "put the tokenizer.json of the model that the file was made from beside it"

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT_4O = _TEKKEN.replace(r"\p{M}]+|", r"\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|")
_GPT_4O = _GPT_4O.replace(r"\p{M}]*|", r"\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|").replace(r"|\p{N}|", r"|\p{N}{1,3}|")

#: Letters that have cases, as DeepSeek's first tokenizer lists them.
_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7d"
    "ᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛ"
    "Ꜣ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_HAN = "[一-龥ࠀ-一가-\ud7ff]+"
_DEEPSEEK = (r"[\r\n]", rf"\s?[{_CASED}]+", "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", r"\s+$", _HAN, r"\p{N}")
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


@dataclass(frozen=True, slots=True)
class Splitting:
    """How text is split before merging. patterns: regular expressions, each of pieces of those before; none: that of
    GPT-2. digits: first split into single digits. composed: characters are composed first (NFC). whole: pieces that
    are tokens are not merged."""

    patterns: tuple[str, ...] = ()
    digits: bool = False
    composed: bool = False
    whole: bool = False

    def steps(self) -> list[dict[str, Any]]:
        """The pre-tokenizers."""
        digits = [{"type": "Digits", "individual_digits": True}] if self.digits else []
        splits = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in self.patterns
        ]
        return [*digits, *splits, _bytes(use_regex=not self.patterns)]


_QWEN2 = Splitting((_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"),), composed=True)
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_AS_LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "lfm2", "falcon-h1")
SPLITTINGS = {
    "gpt-2": Splitting(),
    "smollm": Splitting(digits=True),
    **dict.fromkeys(_AS_LLAMA3, Splitting((_LLAMA3,), whole=True)),
    "qwen2": _QWEN2,
    "qwen35": Splitting((_QWEN35,), composed=True),
    "deepseek-r1-qwen": _QWEN2,
    "tekken": Splitting((_TEKKEN,), whole=True),
    "gpt-4o": Splitting((_GPT_4O,)),
    "glm4": Splitting((_LLAMA3,)),
    "deepseek-llm": Splitting(_DEEPSEEK),
    "deepseek-coder": Splitting(_DEEPSEEK_CODER),
    "deepseek-v3": Splitting(_DEEPSEEK_V3),
}


_GEMMA4 = "gemma4"


def tokenizer_of(file: GgufFile) -> dict[str, Any]:
    """The values of tokenizer.json. Raises ConfigError for an unknown tokenizer."""
    model, pre = file.metadata.get(f"{_KEY}model"), file.metadata.get(f"{_KEY}pre")
    if not tokens_of(file):
        raise ConfigError(f"{file.path}: has no tokenizer ({_KEY}tokens); {_WAY_OUT}")
    if model == "gpt2" and str(pre) in SPLITTINGS:
        return {**_around(file), **_merged_bytes(file, SPLITTINGS[str(pre)])}
    if model == "llama":
        return {**_around(file), **_merged_by_score(file)}
    if model == _GEMMA4:
        return {**_around(file), **_merged_characters(file)}
    known = f"gpt2 with {_KEY}pre of {', '.join(SPLITTINGS)}; llama; and {_GEMMA4}"
    what = f"{_KEY}pre {pre!r} of {_KEY}model {model!r}" if model == "gpt2" else f"{_KEY}model {model!r}"
    raise ConfigError(f"{file.path}: {what} is not supported; {_WAY_OUT}, or take one of: {known}")


def special_tokens(file: GgufFile) -> dict[str, str]:
    """Begin, end and other tokens, by their keys in tokenizer_config.json."""
    keys = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    found = ((there, _token(file, f"{key}_token_id")) for key, there in keys.items())
    return {f"{there}_token": token for there, token in found if token is not None}


def _token(file: GgufFile, key: str) -> str | None:
    tokens, index = tokens_of(file), file.metadata.get(_KEY + key)
    return tokens[index] if type(index) is int and 0 <= index < len(tokens) else None


def _types(file: GgufFile) -> Sequence[int]:
    found, count = file.metadata.get(f"{_KEY}token_type"), len(tokens_of(file))
    if found is None:
        return [_NORMAL] * count
    if not isinstance(found, list) or len(found) != count:
        raise ConfigError(f"{file.path}: {_KEY}token_type must have a number for each of {count} tokens")
    return found


def _around(file: GgufFile) -> dict[str, Any]:
    """The parts that all kinds have. Gemma 4's control tokens that llama.cpp's parsers read are the user's there."""
    shown = file.metadata.get(f"{_KEY}model") == _GEMMA4
    added = [
        {"id": index, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": kind != _USER or shown}
        for index, (token, kind) in enumerate(zip(tokens_of(file), _types(file), strict=True))
        if kind in (_CONTROL, _USER, _UNKNOWN)
    ]  # fmt: skip
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "post_processor": _template(file),
    }


def _template(file: GgufFile) -> dict[str, Any]:
    """The tokens added around a text."""
    is_llama = file.metadata.get(f"{_KEY}model") in ("llama", _GEMMA4) or file.metadata.get(f"{_KEY}pre") in _BEGINS
    first = _around_text(file, "bos", is_llama)
    last = _around_text(file, "eos", False)
    around = dict((*first, *last))
    single = [*map(_named, first), {"Sequence": {"id": "A", "type_id": 0}}, *map(_named, last)]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {token: {"id": token, "ids": [index], "tokens": [token]} for token, index in around.items()},
    }


#: Ways of splitting whose tokenizers add a begin token if the metadata does not say.
_BEGINS = (*_AS_LLAMA3, "tekken")


def _around_text(file: GgufFile, which: str, absent: bool) -> list[tuple[str, int]]:
    token = _token(file, f"{which}_token_id")
    wanted = file.metadata.get(f"{_KEY}add_{which}_token", absent)
    return [(token, file.metadata[f"{_KEY}{which}_token_id"])] if wanted and token is not None else []


def _named(token: tuple[str, int]) -> dict[str, Any]:
    return {"SpecialToken": {"id": token[0], "type_id": 0}}


def _bytes(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _merged_bytes(file: GgufFile, splitting: Splitting) -> dict[str, Any]:
    """BPE of bytes."""
    return {
        "normalizer": {"type": "NFC"} if splitting.composed else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splitting.steps()},
        "decoder": _bytes(use_regex=True),
        "model": _bpe(_vocabulary(file), _stored_merges(file), ignore_merges=splitting.whole),
    }


def _merged_characters(file: GgufFile) -> dict[str, Any]:
    """Gemma 4's BPE of characters: spaces are letters, and what is no token becomes bytes."""
    back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    unknown = _token(file, "unknown_token_id") or ("<unk>" if "<unk>" in tokens_of(file) else None)
    return {
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": _bpe(_vocabulary(file), _stored_merges(file), unk_token=unknown, fuse_unk=True, byte_fallback=True),
    }


def _stored_merges(file: GgufFile) -> list[list[str]]:
    merges = file.metadata.get(f"{_KEY}merges")
    if not isinstance(merges, list):
        raise ConfigError(f"{file.path}: {_KEY}merges is missing; {_WAY_OUT}")
    return [str(merge).split(" ", 1) for merge in merges]


def _bpe(vocabulary: Mapping[str, int], merges: list[Any], **more: Any) -> dict[str, Any]:
    plain = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
             "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}  # fmt: skip
    return {"type": "BPE", **plain, **more, "vocab": vocabulary, "merges": merges}


def _vocabulary(file: GgufFile) -> dict[str, int]:
    """Ids by token, without padding entries of the embedding."""
    kinds = zip(tokens_of(file), _types(file), strict=True)
    return {
        token: index for index, (token, kind) in enumerate(kinds) if not (kind == _UNUSED and token == f"[PAD{index}]")
    }


def _merged_by_score(file: GgufFile) -> dict[str, Any]:
    """SentencePiece's BPE: of all pairs that form a token, the one with the best score is merged first."""
    vocabulary, scores = _vocabulary(file), file.metadata.get(f"{_KEY}scores")
    if not isinstance(scores, list) or len(scores) != len(tokens_of(file)):
        raise ConfigError(f"{file.path}: {_KEY}scores is missing, or not one for each token; {_WAY_OUT}")
    spaced = file.metadata.get(f"{_KEY}add_space_prefix", True)
    prepend, spaces = {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}}
    back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if spaced else []
    normalizers = [*([prepend] if spaced else []), {**spaces, "content": "▁"}]
    unknown = next((token for token, kind in zip(tokens_of(file), _types(file), strict=True) if kind == _UNKNOWN), None)
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": _bpe(
            vocabulary, _merges(file, vocabulary, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True
        ),
    }


def _merges(file: GgufFile, vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """All pairs of tokens that form a token, the best score first."""
    parts = {token for token, index in vocabulary.items() if _types(file)[index] in (_NORMAL, _USER, _UNUSED)}
    pairs = [
        (-scores[vocabulary[token]], vocabulary[token], token[:at], token[at:])
        for token in parts
        for at in range(1, len(token))
        if token[:at] in parts and token[at:] in parts
    ]
    return [(first, second) for _, _, first, second in sorted(pairs)]


_TOKENIZER, _ABOUT = "tokenizer.json", "tokenizer_config.json"
#: The version of the conversion; changed when its result changes.
_VERSION = "6"


def directory_of(file: Path) -> Path:
    """The directory made of the file. Raises ModelError if it cannot be made."""
    tokenizer = file.with_name(_TOKENIZER)  # next to the link, if it is one
    parts = parts_of(file.absolute())
    file, marks = parts[0], [mark for part in (*parts, tokenizer) if part.is_file() for mark in _marks(part)]
    made = _folder() / kernel_cache.key_of(_VERSION, *marks)[:32]
    if not (made / LINK).exists():
        _make(file, tokenizer, made)
    return made


def _folder() -> Path:
    try:
        return kernel_cache.directory("gguf")
    except RuntimeError as error:  # the home directory is unknown
        raise NoSuchModel(f"needs a folder for its converted files: {_WHERE_TO}") from error


_WHERE_TO = "set XDG_CACHE_HOME to a directory that can be written to"


def _marks(file: Path) -> tuple[str, ...]:
    """Values that change when the file does."""
    found = file.stat()
    return str(file), str(file.resolve()), str(found.st_size), str(found.st_mtime_ns)


def _make(file: Path, tokenizer: Path, made: Path) -> None:
    """Make the directory atomically: a partial one is never found."""
    texts = dict(_texts(GgufFile.read(file), tokenizer))
    try:
        made.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        room = Path(tempfile.mkdtemp(dir=made.parent))
        for name, values in texts.items():
            (room / name).write_text(json.dumps(values, ensure_ascii=False), "utf-8")
        (room / LINK).symlink_to(file)
        _clear(made.parent)
        try:
            os.rename(room, made)
        except OSError:
            shutil.rmtree(room, ignore_errors=True)  # another process was first
            if not (made / LINK).exists():
                raise
    except OSError as error:
        raise NoSuchModel(
            f"needs a folder for its converted files: {made.parent}: {error.strerror}; {_WHERE_TO}"
        ) from error


def _clear(folder: Path) -> None:
    """Remove directories of files that no longer exist."""
    for each in folder.iterdir():
        if (each / LINK).is_symlink() and not (each / LINK).exists():
            shutil.rmtree(each, ignore_errors=True)


def _texts(file: GgufFile, tokenizer: Path) -> Iterator[tuple[str, Any]]:
    """The directory's files by name."""
    config, ends = config_of(file), end_tokens(file)
    yield "config.json", {**config, "eos_token_id": ends}
    yield "generation_config.json", {"eos_token_id": ends}
    yield _TOKENIZER, _stored(file, tokenizer) if tokenizer.is_file() else tokenizer_of(file)
    template = file.metadata.get("tokenizer.chat_template")
    # Else transformers says of every large vocabulary that it is split as by Mistral's wrong tokenizer.json, which one
    # that is stored beside a model of Mistral's may be indeed.
    right = file.metadata.get(f"{_KEY}pre") != "tekken" or not tokenizer.is_file()
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        **special_tokens(file),
        **({"fix_mistral_regex": False} if right else {}),
        **({"chat_template": template} if template else {}),
    }
    yield _ABOUT, about


def _stored(file: GgufFile, tokenizer: Path) -> dict[str, Any]:
    """The tokenizer.json next to a file. Raises ConfigError if it belongs to another model."""
    values = dict(Fields.read(tokenizer).values)
    try:
        vocabulary = {**values["model"]["vocab"], **{each["content"]: each["id"] for each in values["added_tokens"]}}
        names = enumerate(tokens_of(file))
        differing = next((token for at, token in names if vocabulary.get(token, at) != at), None)
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{tokenizer}: not a complete tokenizer ({error!r})") from error
    if differing is not None:
        raise ConfigError(f"{tokenizer} is not the tokenizer of {file.path}: {differing!r} has another id there")
    return values
