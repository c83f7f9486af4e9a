"""A text's perplexity under a model: ``python -m bench perplexity MODEL TEXT [--windows 20] [--activations int8]``.

As in llama.cpp's llama-perplexity: windows of 512 tokens, each after the token that begins texts if the model has one,
of which the second half counts. MODEL: a directory, a hub id or a GGUF file. TEXT: a file, UTF-8.
"""

from __future__ import annotations

import math
from argparse import ArgumentParser, Namespace
from pathlib import Path

import torch
from tokenizers import Tokenizer

from bench.drive import Options, build
from bench.quality import chances
from foresay.verifier.model.fields import Fields

WINDOW = 512


def options(parser: ArgumentParser) -> None:
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--activations", choices=("model", "int8"), default="model")


def main(args: Namespace) -> None:
    """Print the perplexity after each window, of all until then."""
    options = Options(args.model, dtype="float32", activations=args.activations)
    engine, lost = build("none", options), list[float]()
    tokens, begin = tokens_of(options.tokenizer, args.text.read_text("utf-8"))
    for number in range(min(args.windows, len(tokens) // WINDOW)):
        window = [*begin, *tokens[number * WINDOW + len(begin) : (number + 1) * WINDOW]]
        found = chances(engine, [(window, WINDOW // 2)])
        lost += (-found.gather(1, torch.tensor(window[WINDOW // 2 :])[:, None])).flatten().tolist()
        print(f"{number + 1:4} {math.exp(sum(lost) / len(lost)):.4f}", flush=True)


def tokens_of(directory: Path, text: str) -> tuple[list[int], list[int]]:
    """The text's tokens, and those before each window."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    first = Fields.read(directory / "tokenizer_config.json").get("bos_token")
    named = first.get("content") if isinstance(first, dict) else first
    known = tokenizer.token_to_id(named) if named else None
    begins = tokenizer.encode("a").ids[:1] == [known]
    return tokenizer.encode(text, add_special_tokens=False).ids, [known] if begins and known is not None else []
