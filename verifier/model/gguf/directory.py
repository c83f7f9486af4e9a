"""A GGUF file as a directory such as models have: configuration and tokenizer in JSON, the file itself as a link.

It is made once, under ``foresay/gguf`` in the user's cache, by the file's place, size and time, and found there again:
so every process that knows models by their directories reads one that is a file.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from foresay.verifier.model.errors import ConfigError, ModelNotFound
from foresay.verifier.model.fields import Fields
from foresay.verifier.model.gguf.config import config_of, end_tokens, tokens_of
from foresay.verifier.model.gguf.file import LINK, GgufFile, parts_of
from foresay.verifier.model.gguf.tokens import special_tokens, tokenizer_of
from foresay.verifier.ops.kernels.cpu import kept

_TOKENIZER, _ABOUT = "tokenizer.json", "tokenizer_config.json"
#: Of what is made of a file; changed where that would be another.
_VERSION = "3"


def directory_of(file: Path) -> Path:
    """The directory made of the file. Raises ModelError if it cannot be made."""
    beside = file.with_name(_TOKENIZER)  # of a link: beside that
    parts = parts_of(file.absolute())
    file, marks = parts[0], [mark for part in (*parts, beside) if part.is_file() for mark in _marks(part)]
    made = _folder() / kept.key_of(_VERSION, *marks)[:32]
    if not (made / LINK).exists():
        _make(file, beside, made)
    return made


def _folder() -> Path:
    try:
        return kept.directory().with_name("gguf")
    except RuntimeError as error:  # nobody knows where home is
        raise ModelNotFound(f"needs a folder for its converted files: {_PLACE}") from error


_PLACE = "set XDG_CACHE_HOME to a directory that can be written to"


def _marks(file: Path) -> tuple[str, ...]:
    """What changes where the file does."""
    found = file.stat()
    return str(file), str(file.resolve()), str(found.st_size), str(found.st_mtime_ns)


def _make(file: Path, beside: Path, made: Path) -> None:
    """All of it or nothing: a half-made one is never found."""
    texts = dict(_texts(GgufFile.read(file), beside))
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
        raise ModelNotFound(
            f"needs a folder for its converted files: {made.parent}: {error.strerror}; {_PLACE}"
        ) from error


def _clear(folder: Path) -> None:
    """Remove what was made of files that are gone."""
    for each in folder.iterdir():
        if (each / LINK).is_symlink() and not (each / LINK).exists():
            shutil.rmtree(each, ignore_errors=True)


def _texts(file: GgufFile, beside: Path) -> Iterator[tuple[str, Any]]:
    """The directory's files by name."""
    config, ends = config_of(file), end_tokens(file)
    yield "config.json", {**config, "eos_token_id": ends}
    yield "generation_config.json", {"eos_token_id": ends}
    yield _TOKENIZER, _stored(file, beside) if beside.is_file() else tokenizer_of(file)
    template = file.metadata.get("tokenizer.chat_template")
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        **special_tokens(file),
        **({"chat_template": template} if template else {}),
    }
    yield _ABOUT, about


def _stored(file: GgufFile, beside: Path) -> dict[str, Any]:
    """The tokenizer.json beside a file. Raises ConfigError if it is that of another model."""
    values = dict(Fields.read(beside).values)
    try:
        vocabulary = {**values["model"]["vocab"], **{each["content"]: each["id"] for each in values["added_tokens"]}}
        names = enumerate(tokens_of(file))
        differing = next((token for at, token in names if vocabulary.get(token, at) != at), None)
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{beside}: not a complete tokenizer ({error!r})") from error
    if differing is not None:
        raise ConfigError(f"{beside} is not the tokenizer of {file.path}: {differing!r} has another id there")
    return values
