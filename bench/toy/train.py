"""Train the bundled target from scratch: ``python -m bench toy.train --text DIR --out DIR --minutes 60``.

A Llama of 7.3 million parameters on public-domain children's stories and grade-school maths. The schedule is a share of
the given time, so the same command makes the best model a machine can in that time. Matrices are trained with Muon
(orthogonalised momentum), the rest with AdamW.
"""

from __future__ import annotations

import json
import random
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from bench.toy import data
from foresay.drafters.training.run import Optimizers

TARGET = {
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 768,
}
DRAFT = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 384,
}


def new_model(shape: dict[str, Any]) -> LlamaForCausalLM:
    """A freshly initialised Llama of the given shape, head_dim 64, tied embeddings."""
    config = LlamaConfig(
        **shape,
        vocab_size=data.VOCAB_SIZE,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=[0, 1],
        pad_token_id=0,
        rms_norm_eps=1e-5,
        initializer_range=0.02,
    )
    return LlamaForCausalLM(config)


def optimizers(model: torch.nn.Module, rate: float) -> Optimizers:
    """Muon for the matrices inside the layers, AdamW for embeddings and norms."""
    inside = [p for n, p in model.named_parameters() if p.ndim == 2 and ".layers." in n]
    return Optimizers(model.parameters(), inside, rate)


def rate_at(share: float) -> float:
    """The learning rate's factor at this share of the time: short warm-up, flat, linear decay over the last 45 %."""
    return min(1.0, share / 0.015 + 0.02, max(0.0, (1.0 - share) / 0.45))


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, out: Path) -> None:
    """The model in bf16 safetensors with its tokenizer, as any loader expects them."""
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    for parameter in copy.parameters():
        parameter.data = parameter.data.bfloat16()
    copy.config.dtype = torch.bfloat16
    copy.generation_config.eos_token_id = [0, 1]
    copy.generation_config.pad_token_id = 0
    copy.save_pretrained(out)
    tokenizer.save_pretrained(out)


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The tokenizer as a transformers class, with the chat template."""
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=data.END_OF_TEXT,
        eos_token=data.END_OF_TEXT,
        pad_token=data.END_OF_TEXT,
        model_max_length=1024,
        additional_special_tokens=data.SPECIAL_TOKENS[1:],
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = data.CHAT_TEMPLATE
    return wrapped


class Batches:
    """Random windows of the token stream."""

    def __init__(self, stream: np.ndarray, seed: int) -> None:
        self.stream, self.random = stream, np.random.default_rng(seed)

    def draw(self, rows: int, length: int) -> torch.Tensor:
        starts = self.random.integers(0, len(self.stream) - length - 1, rows)
        return torch.from_numpy(np.stack([self.stream[s : s + length + 1] for s in starts]).astype(np.int64))


def prepare(text: Path, out: Path) -> tuple[PreTrainedTokenizerFast, np.ndarray, np.ndarray]:
    """Tokenizer, training stream, held-out stream (the last 2 % of the shuffled pieces)."""
    pieces = [p for book in data.stories(text / "pd_children_stories.txt") for p in data.split_pieces(book)]
    maths = data.maths_turns(text / "gsm8k_train.jsonl")
    random.Random(0).shuffle(pieces)
    random.Random(1).shuffle(maths)
    tokenizer = data.train_tokenizer(pieces[:400] + maths)
    packs = ["".join(maths[i : i + 20]) for i in range(0, len(maths), 20)]
    held = [*pieces[-len(pieces) // 50 :], *packs[-8:]]
    train = [*pieces[: -len(pieces) // 50], *packs[:-8]]
    random.Random(2).shuffle(train)
    wrapped = wrap(tokenizer)
    streams = data.encode(tokenizer, train, data.END_OF_TEXT), data.encode(tokenizer, held, data.END_OF_TEXT)
    out.mkdir(parents=True, exist_ok=True)
    np.save(out / "train.npy", streams[0])
    np.save(out / "held.npy", streams[1])
    return wrapped, *streams


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, held: np.ndarray, length: int = 512) -> float:
    """Mean cross-entropy per token on the held-out stream's first windows, in nats."""
    model.eval()
    rows = torch.from_numpy(held[: 32 * (length + 1)].reshape(32, length + 1).astype(np.int64))
    losses = [
        functional.cross_entropy(model(r[:, :-1]).logits.flatten(0, 1), r[:, 1:].flatten()) for r in rows.split(8)
    ]
    model.train()
    return float(torch.stack(losses).mean())


def options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--text", type=Path, required=True, help="folder with pd_children_stories.txt and gsm8k_train.jsonl"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--resume", type=Path, help="go on from this model directory instead of from scratch")
    parser.add_argument("--length", type=int, default=512, help="tokens per window")
    parser.add_argument("--rate", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens per step")
    parser.add_argument("--bf16", action="store_true", help="multiply in bf16: faster where the processor has AMX")


def main(args: Namespace) -> None:
    torch.manual_seed(0)
    tokenizer, train, held = prepare(args.text, args.out)
    print(f"{len(train):,} training tokens, {len(held):,} held out", flush=True)
    model = LlamaForCausalLM.from_pretrained(args.resume, dtype=torch.float32) if args.resume else new_model(TARGET)
    compiled, batches = torch.compile(model, dynamic=False), Batches(train, args.seed)

    def loss() -> Tensor:
        rows = batches.draw(args.tokens // args.length, args.length)
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            logits = compiled(rows[:, :-1]).logits.float()
        return functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())

    def keep() -> None:
        print(json.dumps({"held_out_loss": held_out_loss(model, held)}), flush=True)
        save(model, tokenizer, args.out / "target")

    learn(model, args, loss, keep)


def learn(model: LlamaForCausalLM, args: Namespace, loss_of: Callable[[], Tensor], keep: Callable[[], None]) -> None:
    """Steps until the time is up; a line about every twentieth, and ``keep`` at each eighth of the time and the end."""
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    optimizer, begun, step, kept = optimizers(model, args.rate), time.monotonic(), 0, 0.0
    while (share := (time.monotonic() - begun) / (args.minutes * 60)) < 1:
        loss = loss_of()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(rate_at(share))
        step += 1
        if step % 20 == 1:
            speed = round(step * args.tokens / (time.monotonic() - begun))
            line = {
                "step": step,
                "share": round(share, 3),
                "loss": round(float(loss.detach()), 4),
                "tokens_per_s": speed,
            }
            print(json.dumps(line), flush=True)
        if share - kept > 0.12:
            kept = share
            keep()
    keep()
