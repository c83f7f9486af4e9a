"""The cost of quantisation in quality: ``python -m bench quality [--target DIR] [--tokens 200] [--text FILE ..]``.

The target in fp32 generates texts at temperature 1 after the prompts of ``bench/prompts.jsonl``; or the texts are
pieces of files, at equal distances. Each format of weights, KV and products then reads the same texts: their loss, how
often its most likely token is that of fp32, and its KL divergence from it. Rows read the stored KV, so a text in one
pass has the logits that it has token by token. The weights of a quantised target are unchanged, and fp32 is what they
are multiplied with.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import record
from bench.drive import Options, add_arguments, build, request, run, target_of
from bench.prompts import Encoder, Prompt, encoded
from foresay.kvpaging import PageTable
from foresay.spec.engine import EngineCore
from foresay.spec.protocols import Rows
from foresay.spec.shape import MAX_CHUNK

#: The formats of weights and KV, and of what weights are multiplied with, as fields of :class:`~bench.drive.Options`.
QUANTIZED: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "activations int8": {"activations": "int8"},
    "bfloat16, activations int8": {"dtype": "bfloat16", "activations": "int8"},
    "KV int8": {"dtype": "bfloat16", "kv_dtype": "int8"},
}
WAYS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "KV int8": {"dtype": "bfloat16", "kv_dtype": "int8"},
    "KV fp8": {"dtype": "bfloat16", "kv_dtype": "fp8"},
    "weights int8": {"dtype": "bfloat16", "quantize": "int8"},
    "weights and activations int8": {"dtype": "bfloat16", "quantize": "int8", "activations": "int8"},
    "weights and KV int8": {"dtype": "bfloat16", "quantize": "int8", "kv_dtype": "int8"},
    "weights int4": {"dtype": "bfloat16", "quantize": "int4"},
    "weights int4, activations int8": {"dtype": "bfloat16", "quantize": "int4", "activations": "int8"},
}
#: Of a text: its tokens, and how many of them are the prompt.
Text = tuple[list[int], int]


def drawn(engine: EngineCore, prompts: list[list[int]], tokens: int) -> list[Text]:
    """Prompts and what the engine generates after them."""
    runs = (run(engine, request(prompt, tokens, 1.0, seed)) for seed, prompt in enumerate(prompts))
    return [(prompt + one.tokens, len(prompt)) for prompt, one in zip(prompts, runs, strict=True)]


def read(files: Sequence[Path], encode: Encoder, pieces: int, tokens: int) -> list[Text]:
    """So many pieces of each file, of so many tokens."""
    found = []
    for file in files:
        text = file.read_text(encoding="utf-8")
        for at in range(pieces):
            begin = len(text) * at // pieces
            piece = text[begin : begin + 12 * tokens].partition(" ")[2]
            found.append((encode(Prompt(file.name, piece, chat=False))[:tokens], 1))
    return found


def chances(engine: EngineCore, texts: list[Text]) -> Tensor:
    """fp32[N, V]: log probabilities before each token after the prompts."""
    verifier, found = target_of(engine), []
    for tokens, first in texts:
        table, pieces = PageTable(engine.pool), []
        for part in torch.tensor(tokens).split(MAX_CHUNK):
            table.reserve(len(part))
            pieces.append(verifier.run([Rows(table, part, table.length)]).of(0).clone())
            table.commit(len(part))
        logits = torch.cat(pieces)
        found.append(logits[first - 1 : -1].log_softmax(dim=-1))
        table.release()
    return torch.cat(found)


def report(options: Options, texts: list[Text] | None, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Generate texts if there are none, read them, print the table, return the record."""
    options = replace(options, activations="model")
    engine = build("none", replace(options, dtype="float32"))
    texts = texts or drawn(engine, prompts, tokens)
    wanted, ids = chances(engine, texts), torch.tensor([token for text, first in texts for token in text[first:]])
    found = {"float32": {"loss": _loss(wanted, ids)}}
    for name, way in (QUANTIZED if engine.info.quantization else WAYS).items():
        mine = chances(build("none", replace(options, **way)), texts)
        agree = (mine.argmax(dim=-1) == wanted.argmax(dim=-1)).double().mean().item()
        apart = (wanted.exp() * (wanted - mine)).sum(dim=-1).double().mean().item()
        found[name] = {"loss": _loss(mine, ids), "same_top": agree, "kl": apart}
    lines = [[name, *(f"{value:.5f}" for value in each.values())] for name, each in found.items()]
    heads = ["kept as", "loss", "same most likely token", "KL from fp32"]
    record.table(
        f"{len(ids):,} tokens of {len(texts)} texts", heads, [[*line, *[""] * (4 - len(line))] for line in lines]
    )
    return {"tokens": len(ids), "ways": found}


def _loss(chances: Tensor, ids: Tensor) -> float:
    return -chances.gather(1, ids[:, None]).double().mean().item()


def options(parser: ArgumentParser) -> None:
    add_arguments(parser)
    parser.add_argument("--tokens", type=int, default=200, help="tokens of each text after its prompt, or in all")
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="files of text to read (what is drawn)")
    parser.add_argument("--pieces", type=int, default=8, help="texts to read from each file")


def main(args: Namespace) -> dict[str, Any]:
    options = Options.of(args)
    texts = read(args.text, Encoder(options.tokenizer), args.pieces, args.tokens)
    return {"target": args.target, **report(options, texts, [*encoded(options.tokenizer).values()], args.tokens)}
