"""Train the bundled draft from its target: ``python -m bench toy.distil --target DIR --data DIR --out DIR``.

A Llama of 0.9 million parameters learns the target's whole next-token distribution (KL divergence) on the training
text, which determines how often both sample the same token under shared noise. ``--data`` is the folder to which
``bench toy.train`` wrote its token streams.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM

from bench.toy.train import DRAFT, Batches, learn, new_model, save


def divergence(draft: Tensor, target: Tensor) -> Tensor:
    """KL(target || draft) per position, from logits [.., V], in nats."""
    wanted, given = target.log_softmax(-1), draft.log_softmax(-1)
    return (wanted.exp() * (wanted - given)).sum(-1)


@torch.no_grad()
def agreement(
    draft: LlamaForCausalLM, target: LlamaForCausalLM, held: np.ndarray, length: int = 256
) -> dict[str, float]:
    """On held-out text: mean divergence, and how often both sample the same token with shared noise."""
    rows = torch.from_numpy(held[: 32 * length].reshape(32, length).astype(np.int64))
    ours, theirs = draft(rows).logits.flatten(0, 1), target(rows).logits.flatten(0, 1)
    noise = -torch.empty_like(ours).exponential_(generator=torch.Generator().manual_seed(0)).log()
    return {
        "divergence": float(divergence(ours, theirs).mean()),
        "same_draw_at_1": float(((ours + noise).argmax(-1) == (theirs + noise).argmax(-1)).float().mean()),
        "same_draw_at_0": float((ours.argmax(-1) == theirs.argmax(-1)).float().mean()),
    }


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder with train.npy and held.npy")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--rate", type=float, default=6e-3)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens per step")


def main(args: Namespace) -> None:
    torch.manual_seed(0)
    train, held = np.load(args.data / "train.npy"), np.load(args.data / "held.npy")
    target = LlamaForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
    draft = new_model(DRAFT)
    teach, drafted, batches = (
        torch.compile(target, dynamic=False),
        torch.compile(draft, dynamic=False),
        Batches(train, 4),
    )

    def loss() -> Tensor:
        rows = batches.draw(args.tokens // 256, 256)[:, :-1]
        with torch.no_grad():
            wanted = teach(rows).logits.flatten(0, 1).clone()
        return divergence(drafted(rows).logits.flatten(0, 1), wanted).mean()

    def keep() -> None:
        print(json.dumps(agreement(draft, target, held)), flush=True)
        save(draft, AutoTokenizer.from_pretrained(args.target, trust_remote_code=False), args.out / "draft")

    learn(draft, args, loss, keep)
