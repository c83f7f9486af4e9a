"""What a text depends on besides its request: engines with one identity write the same text for one request and seed.

::

    weights, tokenizer, settings    sha256 of the contents of the files that are used
    numbers                         types of weights, activations, keys and values
    arithmetic                      the class of bits, and for all but the portable one the processor or GPU, and torch

No drafter is part of it: none changes a token. Kept as parts, so that it can be said what differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import torch

from foresay.server.engine.device import LoadContext
from foresay.server.engine.numbers import PORTABLE
from foresay.server.engine.parameters import kv_kind
from foresay.verifier.model.checkpoint import Checkpoint
from foresay.verifier.model.gguf.file import LINK, parts_of
from foresay.verifier.model.rope_config import LongScaling
from foresay.verifier.ops.kernels.cpu import kept
from foresay.verifier.ops.kernels.cpu.jit import Processor

#: The number of the order of sums, roundings and draws (docs/same-tokens.md#the-bits) where bits are not portable: one
#: more when a change of ours changes the tokens that anybody's model writes.
RULES = 2
#: Which files are what, besides the weights; all others of a model change no token.
_PARTS = {
    "tokenizer": ("tokenizer*", "tekken*", "vocab*", "merges*", "special_tokens*", "added_tokens*", "chat_template*"),
    "settings": ("config.json", "generation_config.json"),
}
#: A hub's cache names a large file by its sha256.
_HUB = 64


def identity(loading: LoadContext, activations: str, bits: str, exact: bool) -> dict[str, str]:
    """The parts, each as a string. activations: the type that weights are multiplied with. bits: the class. Weights are
    read once for each version of a file, unless the hub's cache names it by its content."""
    loading.report("reading the fingerprint")
    config, kind, directory = loading.config, kv_kind(loading.model, loading.config.kv_dtype), loading.target
    keys = loading.dtype if kind == "auto" else kind
    numbers = f"{loading.dtype}, activations {activations}, kv {keys}, quantize {config.quantize or 'none'}"
    for scaling in dict.fromkeys(rope.parameters for rope in loading.model.ropes if rope is not None):
        if isinstance(scaling, LongScaling):  # which of its factors are used follows from the longest text
            numbers += f", {'long' if loading.length > scaling.original_positions else 'short'} texts"
    link = directory / LINK
    weights = parts_of(link.resolve()) if link.is_symlink() else Checkpoint.open(directory).files
    claim = "" if exact else ", not exact"
    found = {part: [path for each in patterns for path in directory.glob(each)] for part, patterns in _PARTS.items()}
    return {
        "weights": _digest(weights),
        **{part: _digest(files) for part, files in found.items()},
        "numbers": numbers,
        "arithmetic": f"{_arithmetic(loading, bits)}{claim}",
    }


def _arithmetic(loading: LoadContext, bits: str) -> str:
    if bits == PORTABLE:
        return bits
    here, on = Processor.here(), loading.device.model
    if not loading.device.is_gpu:
        on = f"{here.name}{' with dot products of bf16' if here.multiplies_bf16 else ''}"
    return f"{bits}, rules {RULES} on {on}, torch {torch.__version__}"


def _digest(files: Iterable[Path]) -> str:
    """Of contents, in the order of the files' names; of a single file the name says nothing."""
    ordered = sorted(set(files))
    contents = [f"{path.name if len(ordered) > 1 else ''}={_content(path.resolve())}" for path in ordered]
    return hashlib.sha256("\n".join(contents).encode()).hexdigest()


def _content(path: Path) -> str:
    """The sha256 of a file's content; a large one is read once for each version of it."""
    if len(path.name) == _HUB and path.parent.name == "blobs":
        return path.name
    key = kept.key_of("content", str(path), repr(kept.seen(path)))
    if (known := kept.find(key)) is not None:
        return known.decode()
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    kept.keep(key, found.encode())
    return found
