"""Embed heads into the width of an inflated target, with the same drafts as before.

``python -m bench inflate HEAD OUT --target BIG`` takes Medusa heads, an EAGLE-3 or a DFlash head as ``foresay train``
writes them, and a target that :mod:`bench.inflate` made of theirs. A head then costs what one of the large width costs:
a layer has the target's heads and inner width, every matrix that reads a hidden state is as wide as that.

What keeps the function, besides what :mod:`bench.inflate` describes for layers::

    Medusa     blocks: rows into extra dimensions and columns from them are about 1e-9; outputs are the target's kind
    EAGLE-3    fc: each feature's extra columns, and rows into extra dimensions, are about 1e-9
               [norm e; norm h]: two halves of the large width, the source's numbers in front of each
               output: the draft vocabulary stays, extra columns are about 1e-9
    DFlash     fc as EAGLE's, layers as the target's; the norm in front of the output is the target's kind
    features   the target's own layers come first, so their numbers are unchanged

In fp32 the same trees are drafted and the same tokens emitted; in bf16 the norm weights are rounded differently from
the source's, so texts diverge sooner or later and only acceptance rates stay the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from bench.inflate import TINY, CannotInflate, Inflation, Shape, inflated_config, read_tensors, shape_of
from foresay.verifier.heads.layouts import kind_of

LAYER = "midlayer."
NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


class HeadInflation(Inflation):
    """One embedding of heads of width ``small.hidden`` into ``large.hidden``.

    small, large: shapes of a head's layers, or with only the widths right for Medusa heads. vocab: the large
    target's.
    """

    def medusa(self, source: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The large set's (name, tensor) pairs."""
        for name, tensor in source.items():
            match name.split("."):
                case [_, _, "linear", "weight"]:
                    large = self._square(tensor)
                case [_, _, "linear", "bias"]:
                    large = self._random((self.large.hidden,), TINY)
                    large[: self.small.hidden] = self._read(tensor)
                case [_, _, "weight"]:
                    large = self._vocabulary(tensor, own=0.0)
                case _:
                    raise CannotInflate(f"{name}: only Medusa heads as foresay train writes them can be inflated")
            yield name, large.to(tensor.dtype)

    def _square(self, source: Tensor) -> Tensor:
        residual = torch.arange(self.small.hidden)
        return self._placed(source, residual, residual, (self.large.hidden, self.large.hidden), TINY)

    def eagle(self, source: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The large EAGLE-3 head's (name, tensor) pairs. Norm weights come in fp32, as in the target."""
        small, wide = self.small.hidden, self.large.hidden
        residual, (known, dtype) = torch.arange(small), (len(source["lm_head.weight"]), source["fc.weight"].dtype)
        places = {"fc": self._fc_fit(source["fc.weight"])}
        places |= {LAYER + name: place for name, place in self._plan(_first_of_each(2, small, wide), 2 * wide).items()}
        places["lm_head"] = (torch.arange(known), residual, (known, wide), TINY)
        for name, place in places.items():
            placed = self._placed(source[f"{name}.weight"], *place)
            yield f"{name}.weight", self._scored(name.removeprefix(LAYER), placed, True).to(dtype)
        for name in (*(LAYER + norm for norm in NORMS), "norm"):
            yield f"{name}.weight", self._inner_norm(source[f"{name}.weight"])
        if known < self.vocab:
            yield "d2t", source.get("d2t", torch.zeros(known, dtype=torch.int64))
            ids = torch.arange(known) + source.get("d2t", 0)
            yield "t2d", torch.zeros(self.vocab, dtype=torch.bool).index_fill(0, ids, True)

    def dflash(self, source: Mapping[str, Tensor], known: int) -> Iterator[tuple[str, Tensor]]:
        """The large DFlash head's (name, tensor) pairs. known: the source's vocabulary."""
        fc = source["fc.weight"]
        yield "fc.weight", self._placed(fc, *self._fc_fit(fc)).to(fc.dtype)
        for layer in range(self.small.layers):
            yield from self._layer(f"layers.{layer}.", source, True, fc.dtype)
        yield from (
            (name, tensor) for name, tensor in source.items() if name.endswith(("q_norm.weight", "k_norm.weight"))
        )
        yield "hidden_norm.weight", self._inner_norm(source["hidden_norm.weight"])
        yield "norm.weight", self._final_norm(source["norm.weight"], known)

    def _fc_fit(self, source: Tensor) -> tuple[Tensor, Tensor, tuple[int, int], float]:
        small, wide = self.small.hidden, self.large.hidden
        features = source.shape[1] // small
        columns = _first_of_each(features, small, wide)
        return torch.arange(small), columns, (wide, features * wide), TINY


def _first_of_each(count: int, small: int, wide: int) -> Tensor:
    """The columns of the source's numbers where ``count`` vectors of width ``wide`` are adjacent."""
    return (torch.arange(count)[:, None] * wide + torch.arange(small)).flatten()


def check_eagle(config: Mapping[str, Any], source: Mapping[str, Tensor]) -> None:
    """Raise CannotInflate for anything but an EAGLE-3 head as ``foresay train`` writes it."""
    matrices = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    known = {f"{LAYER}{name}.weight" for name in (*matrices, *NORMS)} | {"fc.weight", "norm.weight", "lm_head.weight"}
    odd = sorted(known ^ set(source) - {"d2t", "t2d"})
    if odd:
        raise CannotInflate(f"{odd[0]}: only EAGLE-3 heads as foresay train writes them can be inflated")
    if not (config.get("eagle_config") or config).get(LAYER_IDS):
        raise CannotInflate(f"config.json names no {LAYER_IDS}: those of a deeper target would be other ones")


def inflated_from(target: Path) -> tuple[dict[str, Any], Shape, Shape]:
    """The target's config.json, the shape it was inflated from, and its own."""
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    if "foresay_inflated" not in config:
        raise CannotInflate(f"{target} was not made by bench.inflate")
    return config, Shape(**config["foresay_inflated"]["source_shape"]), shape_of(config)


def inflate_head(source: Path, out: Path, target: Path, seed: int = 1) -> int:
    """Write the head in ``source`` for the inflated ``target`` as the directory ``out``; the number of its parameters.

    Raises CannotInflate if head and target do not belong together, or the head is of an unknown kind.
    """
    kind, tensors = kind_of(source), read_tensors(source)
    make = _medusa if kind == "medusa" else _dflash if kind == "dflash" else _eagle
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    made, config = make(config, tensors, target, {"source": source.name, "seed": seed})
    out.mkdir(parents=True, exist_ok=True)
    file = "medusa_lm_head.safetensors" if kind == "medusa" else "model.safetensors"
    save_file(made, out / file, metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return sum(tensor.numel() for name, tensor in made.items() if name not in ("d2t", "t2d"))


Config = dict[str, Any]
Large = tuple[dict[str, Tensor], Config]


def _medusa(config: Config, tensors: Mapping[str, Tensor], target: Path, note: Config) -> Large:
    theirs, small, large = inflated_from(target)
    check_width(next(iter(tensors.values())).shape[-1], small)
    inflation = HeadInflation(small, large, 1, int(theirs["vocab_size"]), seed=note["seed"])
    return dict(inflation.medusa(tensors)), {**config, "foresay_inflated": note}


def _eagle(config: Config, tensors: Mapping[str, Tensor], target: Path, note: Config) -> Large:
    check_eagle(config, tensors)
    inflation, config = _of_layers({"draft_vocab_size": config["vocab_size"], **config}, target, note)
    return dict(inflation.eagle(tensors)), config


def _dflash(config: Config, tensors: Mapping[str, Tensor], target: Path, note: Config) -> Large:
    if config.get("model_type") != "qwen3" or "fc.weight" not in tensors:
        raise CannotInflate("only DFlash heads as foresay train writes them can be inflated")
    known, (theirs, *_) = int(config["vocab_size"]), inflated_from(target)
    inflation, config = _of_layers(config, target, note)
    return dict(inflation.dflash(tensors, known)), {**config, "num_target_layers": theirs["num_hidden_layers"]}


def _of_layers(config: Config, target: Path, note: Config) -> tuple[HeadInflation, Config]:
    """For a head with its own layers, as many as before; and its configuration."""
    theirs, small, large = inflated_from(target)
    check_width(int(config["hidden_size"]), small)
    own = shape_of({"num_hidden_layers": 1, **config})
    vocab, large = int(theirs["vocab_size"]), replace(large, layers=own.layers)
    inflation = HeadInflation(own, large, int(config["head_dim"]), vocab, seed=note["seed"])
    return inflation, inflated_config(config, large, vocab, {**note, "source_shape": asdict(own)})


def check_width(width: int, small: Shape) -> None:
    """Raise CannotInflate unless the head is as wide as the target's source."""
    if width != small.hidden:
        raise CannotInflate(f"the head is {width} wide, but the target was inflated from one of {small.hidden}")
