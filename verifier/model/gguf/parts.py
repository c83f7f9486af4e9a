"""Which files of a directory or a repository are one GGUF file: those of llama.cpp's ``gguf-split``, or one by itself.

::

    name-00001-of-00003.gguf    the first: metadata, and perhaps tensors
    name-00002-of-00003.gguf    more tensors
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from foresay.verifier.model.errors import ModelNotFound

_PART = re.compile(r"-\d{5}-of-(\d{5})(?=\.gguf$)")
#: What the file is called in a directory that was made of it.
LINK = "model.gguf"
#: Files of a model's eyes, which are not read.
_PROJECTOR = "mmproj"


def first_of(name: str) -> str:
    """The first part's name; a file that is no part is the only one."""
    return _PART.sub(r"-00001-of-\1", name)


def parts_of(file: Path) -> tuple[Path, ...]:
    """All parts, the first one first."""
    found = _PART.search(file.name)
    if found is None:
        return (file,)
    return tuple(file.with_name(_PART.sub(rf"-{number:05}-of-\1", file.name)) for number in range(1, int(found[1]) + 1))


def chosen(names: Iterable[str], wanted: str) -> str | None:
    """The first part of the file that is wanted: by its name, or by a word in that, such as ``Q4_K_M``; "" for the only
    one. None if there is no GGUF file at all. Raises ModelNotFound if none is meant, or several are.
    """
    files = sorted({first_of(name) for name in names if name.endswith(".gguf") and _PROJECTOR not in name.lower()})
    if not files:
        return None
    word = re.compile(rf"(?<![a-z0-9]){re.escape(wanted.lower())}(?![a-z0-9_])")
    found = [name for name in files if first_of(wanted) == name]
    found = found or [name for name in files if not wanted or word.search(_PART.sub("", name.lower()))]
    if len(found) != 1:
        what = "several GGUF files" if found or not wanted else f"no GGUF file called {wanted}"
        raise ModelNotFound(
            f"has {what} ({', '.join(found or files)}): name one after a colon, as in OWNER/NAME:Q4_K_M"
        )
    return found[0]
