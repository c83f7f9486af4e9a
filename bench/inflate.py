"""Embed a small trained Llama into the shape of a large one without changing its function.

``python -m bench inflate SOURCE OUT --shape 135m [--vocab 49152] [--positions 8192]`` writes an ordinary checkpoint
directory with the cost of a model of the large shape and the output of the small one, so that a toy pair measures a
real engine.

What keeps the function::

    residual   x = [ small model's hidden state | extra dimensions, about 1e-9 | the constant, 2**-12 ]
    RMSNorm    the mean runs over more dimensions: weights times sqrt(h/H), eps times h/H
    exits      o and down: rows into extra dimensions and columns from extra heads or inner units are about 1e-9
    heads      query head i stays with its kv head; each kv head's group is filled up with random query heads
    layers     extra layers come last, all of their exits about 1e-9
    vocabulary new rows read the constant with a large negative weight, so that they never take mass
    head dim   pair i of a head goes to pair i * wide/narrow, which rotates as fast; queries times sqrt(wide/narrow)
    q/k norm   queries and keys times 2**-24, so that eps alone decides the norm: its weight takes both back

The last two only for models made in memory (:mod:`bench.made`).

Everything else is random, and nothing is zero or repeated, so that engines cannot share equal constants or skip
anything. The constant is needed because a zero row has logit 0, which takes mass at temperature 1. The final norm
divides it by the size of x like every other dimension and its weight scales it back to order one; the other norms
reduce it to 1e-9. In fp16 the 1e-9 become zero, which keeps the function but not the "nothing repeated".
"""

from __future__ import annotations

import json
import math
import shutil
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench import BadOption

TINY = 1e-9  # size of an exit: far below half a unit in the last place of any hidden state
WEIGHT = 0.02  # standard deviation of the random weights
CONSTANT = 2.0**-12  # the constant dimension; its square is lost in the mean of squares
GAIN = 2.0**10  # the final norm's weight on the constant
FAINT = 2.0**-24  # size of queries and keys before a norm whose eps must outweigh them
REPEL = 2.0**15  # a new row's weight on it: logit -2**13 * sqrt(H) / |x|, below -190 up to |x| = 1000 at H = 576

QUERIES_AND_KEYS = ("self_attn.q_proj", "self_attn.k_proj")
COPIED = ("tokenizer*", "special_tokens*", "chat_template*", "generation_config.json", "vocab.json", "merges.txt")


class CannotInflate(BadOption):
    """The checkpoint does not fit into the shape, or is of a kind that this module cannot embed."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes that determine a step's cost. head_dim is the source's: rotary frequencies depend on it."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.heads // self.kv_heads


SHAPES = {  # for head_dim 64; "8b" moves the bytes of an 8B with head_dim 128
    "135m": Shape(layers=30, hidden=576, heads=9, kv_heads=3, inner=1536),
    "360m": Shape(layers=32, hidden=960, heads=15, kv_heads=5, inner=2560),
    "1b": Shape(layers=16, hidden=2048, heads=32, kv_heads=8, inner=8192),
    "8b": Shape(layers=32, hidden=4096, heads=64, kv_heads=16, inner=14336),
}
CONFIG_KEYS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "inner": "intermediate_size",
}


def shape_of(config: Mapping[str, Any]) -> Shape:
    """The shape a Llama config.json describes."""
    return Shape(**{field: int(config[key]) for field, key in CONFIG_KEYS.items()})


def parse_shape(text: str, source: Shape) -> Shape:
    """``135m``, or ``hidden=192,layers=4``: fields that are not named keep the source's value."""
    if text in SHAPES:
        return SHAPES[text]
    try:
        return replace(source, **{k: int(v) for k, v in (part.split("=") for part in text.split(","))})
    except (TypeError, ValueError):
        fields = ", ".join(CONFIG_KEYS)
        raise CannotInflate(f"shape {text!r}: give one of {', '.join(SHAPES)}, or {fields} as name=number") from None


class Inflation:
    """One embedding of a source of shape ``small`` into ``large``; yields the large model's tensors one at a time.

    The random numbers are drawn in the order of the tensors, from one generator on ``device``. wide: the large model's
    head_dim, a multiple of the source's; None: the same. qk_eps: the eps of a norm of queries and keys that only the
    large model has; None: neither has one. untied: a tied source becomes one with a separate head.
    """

    def __init__(
        self,
        small: Shape,
        large: Shape,
        head_dim: int,
        vocab: int,
        *,
        seed: int = 0,
        device: str | torch.device = "cpu",
        wide: int | None = None,
        qk_eps: float | None = None,
        untied: bool = False,
    ) -> None:
        check_fits(small, large)
        self.small, self.large, self.head_dim, self.vocab = small, large, head_dim, vocab
        self.wide, self.qk_eps, self.untied = wide or head_dim, qk_eps, untied
        if self.wide % head_dim:
            raise CannotInflate(f"head_dim = {self.wide} is no multiple of the source's {head_dim}")
        self.device = torch.device(device)
        self.generator = torch.Generator(device=self.device).manual_seed(seed)

    def tensors(self, source: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The large checkpoint's (name, tensor) pairs. Norm weights come in fp32: sqrt(h/H) is no bf16 number."""
        embed = source["model.embed_tokens.weight"]
        head = source.get("lm_head.weight", embed if self.untied else None)
        yield "model.embed_tokens.weight", self._vocabulary(embed, own=CONSTANT)
        for layer in range(self.large.layers):
            yield from self._layer(f"model.layers.{layer}.", source, layer < self.small.layers, embed.dtype)
        yield "model.norm.weight", self._final_norm(source["model.norm.weight"], len(embed))
        if head is not None:
            yield "lm_head.weight", self._vocabulary(head, own=0.0)

    def _layer(
        self, prefix: str, source: Mapping[str, Tensor], trained: bool, dtype: torch.dtype
    ) -> Iterator[tuple[str, Tensor]]:
        for name, (rows, columns, shape, scale) in self._plan(
            torch.arange(self.small.hidden), self.large.hidden
        ).items():
            stored = source[f"{prefix}{name}.weight"] if trained else None
            placed = self._placed(stored, rows, columns, shape, scale)
            yield f"{prefix}{name}.weight", self._scored(name, placed, trained).to(dtype)
        if self.qk_eps is not None:
            for name in ("self_attn.q_norm", "self_attn.k_norm"):
                weight = 1 + self._random((self.wide,), 0.1 if not trained else 0.0)
                yield f"{prefix}{name}.weight", weight * math.sqrt(self.qk_eps) / FAINT
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{name}.weight", self._inner_norm(source[f"{prefix}{name}.weight"] if trained else None)

    def _plan(self, read: Tensor, width: int) -> dict[str, tuple[Tensor, Tensor, tuple[int, int], float]]:
        """A layer's matrices: the rows and columns of the source's numbers, the large shape, and the size of the rest.

        read: which of the ``width`` numbers that the attention reads are the source's.
        """
        big, d = self.large, self.wide
        residual, inner = torch.arange(self.small.hidden), torch.arange(self.small.inner)
        queries, keys = self._rows(self._query_heads()), self._rows(torch.arange(self.small.kv_heads))
        return {
            "self_attn.q_proj": (queries, read, (big.heads * d, width), WEIGHT),
            "self_attn.k_proj": (keys, read, (big.kv_heads * d, width), WEIGHT),
            "self_attn.v_proj": (keys, read, (big.kv_heads * d, width), WEIGHT),
            "self_attn.o_proj": (residual, queries, (big.hidden, big.heads * d), TINY),
            "mlp.gate_proj": (inner, residual, (big.inner, big.hidden), WEIGHT),
            "mlp.up_proj": (inner, residual, (big.inner, big.hidden), WEIGHT),
            "mlp.down_proj": (residual, inner, (big.hidden, big.inner), TINY),
        }

    def _placed(
        self, source: Tensor | None, rows: Tensor, columns: Tensor, shape: tuple[int, int], scale: float
    ) -> Tensor:
        """A random matrix in fp32, with the source's numbers in its rows and columns."""
        weight = self._random(shape, scale)
        if source is not None:
            weight[rows[:, None], columns] = self._read(source)
        return weight

    def _scored(self, name: str, weight: Tensor, trained: bool) -> Tensor:
        """A projection as its scores need it: the wider head's scale removed, keys without the new pairs, and both
        faint before a norm."""
        if name == "self_attn.q_proj" and trained:
            weight *= math.sqrt(self.wide / self.head_dim)
        if name == "self_attn.k_proj" and trained:
            weight.view(-1, self.wide, weight.shape[1])[:, self._new_pairs()] *= TINY
        return weight * FAINT if self.qk_eps is not None and name in QUERIES_AND_KEYS else weight

    def _vocabulary(self, rows: Tensor, own: float) -> Tensor:
        """Embedding or head, [V, H]: ``own`` in the constant dimension of the source's rows, -REPEL in the new ones."""
        known, h = rows.shape
        weight = self._random((self.vocab, self.large.hidden), TINY)
        weight[:, :h] = self._random((self.vocab, h), WEIGHT)
        weight[:known, :h] = self._read(rows)
        if self.vocab > known:
            weight[:known, -1] = own
            weight[known:, -1] = -REPEL
        return weight.to(rows.dtype)

    def _norm(self, source: Tensor | None) -> Tensor:
        """Norm weight [H] in fp32: random about one, the source's first, all of it rescaled to the longer mean."""
        weight = 1 + self._random((self.large.hidden,), 0.1)
        if source is not None:
            weight[: self.small.hidden] = self._read(source)
        return weight * math.sqrt(self.small.hidden / self.large.hidden)

    def _final_norm(self, source: Tensor, known: int) -> Tensor:
        """The norm before the output, which amplifies the constant if the vocabulary of ``known`` has grown."""
        weight = self._norm(source)
        if self.vocab > known:
            weight[-1] = GAIN
        return weight

    def _inner_norm(self, source: Tensor | None) -> Tensor:
        """The norm before a layer's matrices: none of them may read the constant."""
        weight = self._norm(source)
        if self.large.hidden > self.small.hidden:
            weight[-1] = TINY
        return weight

    def _query_heads(self) -> Tensor:
        """The position of each source query head: the same one in the group of the same kv head."""
        head = torch.arange(self.small.heads)
        return head // self.small.group * self.large.group + head % self.small.group

    def _rows(self, heads: Tensor) -> Tensor:
        return (heads[:, None] * self.wide + self._pairs()).flatten()

    def _pairs(self) -> Tensor:
        """The positions of a source head's numbers in a wider one: its pair i at the pair that rotates as fast."""
        first = torch.arange(0, self.wide // 2, self.wide // self.head_dim)
        return torch.cat((first, self.wide // 2 + first))

    def _new_pairs(self) -> Tensor:
        """The numbers of a wider head that are not the source's."""
        new = torch.ones(self.wide, dtype=torch.bool)
        new[self._pairs()] = False
        return new.nonzero().flatten()

    def _random(self, shape: tuple[int, ...], scale: float) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device) * scale

    def _read(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, torch.float32)


def check_fits(small: Shape, large: Shape) -> None:
    """Raise CannotInflate if the large shape lacks room."""
    for field in (*CONFIG_KEYS, "group"):
        if getattr(large, field) < getattr(small, field):
            raise CannotInflate(f"{field} = {getattr(large, field)} is below the source's {getattr(small, field)}")
    if large.heads % large.kv_heads:
        raise CannotInflate(f"{large.heads} query heads do not divide into {large.kv_heads} kv heads")


def check_source(config: Mapping[str, Any], large: Shape, vocab: int) -> None:
    """Raise CannotInflate for a source outside plain Llama, or a vocabulary that cannot grow."""
    if config["model_type"] != "llama" or config.get("attention_bias") or config.get("mlp_bias"):
        raise CannotInflate(f"{config['model_type']}: only Llama checkpoints without biases can be inflated")
    if vocab < config["vocab_size"]:
        raise CannotInflate(f"a vocabulary of {vocab} is below the source's {config['vocab_size']}")
    if vocab > config["vocab_size"] and large.hidden == config["hidden_size"]:
        raise CannotInflate("a larger vocabulary needs at least one extra hidden dimension, for its constant")


def inflated_config(config: dict[str, Any], large: Shape, vocab: int, note: dict[str, Any]) -> dict[str, Any]:
    """The source's config.json with the new sizes, eps for the longer mean, and ``foresay_inflated``."""
    sizes = {key: getattr(large, field) for field, key in CONFIG_KEYS.items()}
    eps = config["rms_norm_eps"] * config["hidden_size"] / large.hidden
    return {**config, **sizes, "vocab_size": vocab, "rms_norm_eps": eps, "foresay_inflated": note}


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """All tensors of the directory's safetensors files."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise CannotInflate(f"{directory} holds no safetensors file")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def inflate(
    source: Path, out: Path, shape: str, vocab: int | None = None, seed: int = 0, positions: int | None = None
) -> int:
    """Write ``source`` embedded into ``shape`` as the checkpoint directory ``out``; the number of its parameters.

    positions: the longest text, if not the source's; the source was not trained on longer ones, but costs are true.
    """
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    small = shape_of(config)
    large = parse_shape(shape, small)
    vocab = vocab or int(config["vocab_size"])
    check_source(config, large, vocab)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    tensors = dict(Inflation(small, large, head_dim, vocab, seed=seed).tensors(read_tensors(source)))
    note = {"source": source.name, "source_shape": asdict(small), "source_vocab": config["vocab_size"], "seed": seed}
    positions = positions or int(config["max_position_embeddings"])
    config = {**config, "head_dim": head_dim, "max_position_embeddings": positions}
    config = inflated_config(config, large, vocab, note)
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for pattern in COPIED:
        for file in source.glob(pattern):
            shutil.copy2(file, out / file.name)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return sum(tensor.numel() for tensor in tensors.values())


def options(parser: ArgumentParser) -> None:
    parser.add_argument("source", type=Path, help="directory of a trained Llama checkpoint, or with --target of a head")
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", default="135m", help=f"{', '.join(SHAPES)}, or hidden=192,layers=4,...")
    parser.add_argument("--vocab", type=int, help="rows of the embedding; the source's by default")
    parser.add_argument("--positions", type=int, help="tokens of the longest text; the source's by default")
    parser.add_argument("--target", type=Path, help="SOURCE is Medusa heads, an EAGLE-3 or a DFlash head of its source")
    parser.add_argument("--seed", type=int, help="of the random numbers (0; of a head 1)")


def main(args: Namespace) -> None:
    from bench.inflate_heads import inflate_head  # which imports this module

    if args.target:
        parameters = inflate_head(args.source, args.out, args.target, 1 if args.seed is None else args.seed)
    else:
        parameters = inflate(args.source, args.out, args.shape, args.vocab, args.seed or 0, args.positions)
    print(f"{args.out}: {parameters:,} parameters, inflated from {args.source.name}")
