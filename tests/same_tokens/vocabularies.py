"""Draft models of another vocabulary than the target's: the same model renumbered, and tokenizers of another make."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor

from foresay.drafters.draft_model import DraftModelDrafter
from foresay.kvpaging import PagePool
from foresay.server.engine.vocabulary import Translation, translation
from foresay.spec.protocols import Drafter
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import DraftTree, TreeShape
from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.decoder import Decoder
from foresay.verifier.model.weights import load
from tests.same_tokens.heads import Passing
from tests.same_tokens.models import Pair, paged
from tests.same_tokens.test_directories import write_tokenizer

TEXT = ["the quick brown fox jumps over the lazy dog, says the other fox\n"] * 3


def write_sentencepiece(directory: Path, vocab_size: int) -> Tokenizer:
    """A BPE as Llama 2 has it: spaces are written as a block, bytes of rare characters as ``<0x..>``."""
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    marks = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=marks, show_progress=False)
    backend.train_from_iterator([line.strip() for line in TEXT], trainer)
    content = json.loads(backend.to_str())
    content["added_tokens"] = content["added_tokens"][:3]  # the bytes are ordinary pieces
    backend = Tokenizer.from_str(json.dumps(content))
    assert backend.get_vocab_size() == vocab_size
    backend.save(str(directory / "tokenizer.json"))
    return backend


def write_marked(directory: Path, vocab_size: int) -> None:
    """A byte-level BPE with ten special tokens at the end."""
    write_tokenizer(directory, vocab_size - 10)
    backend = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert backend.add_special_tokens([f"<|mark {number}|>" for number in range(10)]) == 10
    backend.save(str(directory / "tokenizer.json"))


def order_without(vocab_size: int, share: float, keep: Sequence[int], seed: int = 0) -> list[int]:
    """The ids in random order, a share of them left out, but none of ``keep``."""
    rng = random.Random(seed)
    gone = set(rng.sample([id for id in range(vocab_size) if id not in keep], round(share * vocab_size)))
    return rng.sample([id for id in range(vocab_size) if id not in gone], vocab_size - len(gone))


def renumbered(source: Path, destination: Path, order: Sequence[int]) -> Path:
    """A copy of a checkpoint with a byte-level BPE whose token i is the former token ``order[i]``; others are gone."""
    shutil.copytree(source, destination)
    known = {old: new for new, old in enumerate(order)}
    _change(destination / "tokenizer.json", lambda content: _tokenizer(content, known))
    for name in ("config.json", "generation_config.json"):
        _change(destination / name, lambda content: _ends(content, known))
    _change(destination / "config.json", lambda content: content | {"vocab_size": len(order)})
    weights = load_file(destination / "model.safetensors")
    for name in {"model.embed_tokens.weight", "lm_head.weight"}.intersection(weights):
        weights[name] = weights[name][torch.tensor(order)].contiguous()
    save_file(weights, destination / "model.safetensors", metadata={"format": "pt"})
    return destination


def _change(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text("utf-8")))), "utf-8")


def _tokenizer(content: dict[str, Any], known: dict[int, int]) -> dict[str, Any]:
    model = content["model"]
    model["vocab"] = {token: known[id] for token, id in model["vocab"].items() if id in known}
    merges = [merge if isinstance(merge, list) else merge.split(" ") for merge in model["merges"]]
    model["merges"] = [merge for merge in merges if {*merge, "".join(merge)} <= model["vocab"].keys()]
    content["added_tokens"] = [t | {"id": known[t["id"]]} for t in content["added_tokens"] if t["id"] in known]
    model["vocab"] |= {token["content"]: token["id"] for token in content["added_tokens"]}
    return content


def _ends(content: dict[str, Any], known: dict[int, int]) -> dict[str, Any]:
    ends = content.get("eos_token_id")
    if ends is not None:
        content["eos_token_id"] = [known[end] for end in ([ends] if isinstance(ends, int) else ends)]
    return content


@dataclass(frozen=True, eq=False)
class Translated(Pair):
    """A pair whose draft model reads and proposes the target's ids. translation: between both vocabularies."""

    translation: Translation

    @classmethod
    def of(cls, pair: Pair, draft: Path) -> Translated:
        """The target of a pair with the draft model in a directory."""
        ours, theirs = ModelConfig.from_directory(pair.directory), ModelConfig.from_directory(draft)
        made = translation("draft", pair.directory, ours, draft, theirs)
        assert made is not None
        decoder = with_columns(draft, made.columns, pair.draft.dtype)
        return cls(pair.directory, draft, pair.target, decoder, made)

    def draft_model(self, pool: PagePool) -> DraftModelDrafter:
        made = self.translation
        return DraftModelDrafter(paged(self.draft, pool), read=made.read, token_ids=made.token_ids)


def with_columns(directory: Path, columns: Tensor, dtype: torch.dtype) -> Decoder:
    """A checkpoint's decoder that has logits of these tokens alone."""
    config = ModelConfig.from_directory(directory)
    weights = load(directory, config, dtype)
    weights.lm_head = weights.lm_head[columns]
    return Decoder(config, weights, config.max_positions + 64)


class Noted(Passing):
    """Notes every tree that another drafter proposes, by sequence."""

    def __init__(self, inner: Drafter) -> None:
        super().__init__(inner)
        self.trees: list[tuple[str, list[int], list[int]]] = []

    def propose(self, sequences: Sequence[SequenceState], shapes: Sequence[TreeShape]) -> list[DraftTree]:
        trees: list[DraftTree] = self.inner.propose(sequences, shapes)
        for sequence, tree in zip(sequences, trees, strict=True):
            self.trees.append((sequence.id, tree.tokens, tree.parents))
        return trees
