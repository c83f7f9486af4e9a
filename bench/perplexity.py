"""How likely a model finds a text: ``python -m bench.perplexity MODEL TEXT [--windows 20] [--activations int8]``.

As llama.cpp's llama-perplexity has it: windows of 512 tokens, each behind the token that begins texts if the model has
one, in each of which the second half is counted. MODEL: a directory, a hub id or a GGUF file. TEXT: a file, UTF-8.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.nn import functional

from foresay.kvpaging import KVStore, PagePool, PageTable
from foresay.spec.protocols import Rows
from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.decoder import Decoder
from foresay.verifier.model.fields import Fields
from foresay.verifier.model.hub import resolve
from foresay.verifier.model.sizes import kv_shapes
from foresay.verifier.model.weights import load
from foresay.verifier.paged_model import PagedModel

WINDOW, PAGE = 512, 16


def decoder_of(directory: Path, dtype: torch.dtype, rounds: bool) -> Decoder:
    """The model, for texts of a window."""
    config = ModelConfig.from_directory(directory)
    return Decoder(config, load(directory, config, dtype), WINDOW, rounds)


def tokens_of(directory: Path, text: str) -> tuple[list[int], list[int]]:
    """The text's tokens, and what stands before each window."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    first = Fields.read(directory / "tokenizer_config.json").get("bos_token")
    named = first.get("content") if isinstance(first, dict) else first
    known = tokenizer.token_to_id(named) if named else None
    begins = tokenizer.encode("a").ids[:1] == [known]
    return tokenizer.encode(text, add_special_tokens=False).ids, [known] if begins and known is not None else []


def surprise(model: PagedModel, pool: PagePool, tokens: list[int]) -> list[float]:
    """Minus the logarithm of the chance of each token of the second half, behind all before it."""
    table = PageTable(pool)
    table.reserve(len(tokens))
    ids, half = torch.tensor(tokens), len(tokens) // 2
    logits = model.run([Rows(table, ids, 0)]).of(0)[half - 1 : -1]
    table.release()
    found: list[float] = functional.cross_entropy(logits, ids[half:], reduction="none").tolist()
    return found


def main() -> None:
    """Print the perplexity after each window, of all until then."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--activations", choices=("model", "int8"), default="model")
    asked = parser.parse_args()
    directory = resolve(asked.model)
    decoder = decoder_of(directory, torch.float32, asked.activations == "int8")
    config, pool = decoder.config, PagePool(1 + WINDOW // PAGE, PAGE)
    store = KVStore(pool, kv_shapes(config), decoder.dtype)
    model, lost = PagedModel(decoder, store, WINDOW), list[float]()
    tokens, begin = tokens_of(directory, asked.text.read_text("utf-8"))
    for number in range(min(asked.windows, len(tokens) // WINDOW)):
        window = tokens[number * WINDOW : (number + 1) * WINDOW]
        lost += surprise(model, pool, [*begin, *window[len(begin) :]])
        print(f"{number + 1:4} {math.exp(sum(lost) / len(lost)):.4f}", flush=True)


if __name__ == "__main__":
    main()
