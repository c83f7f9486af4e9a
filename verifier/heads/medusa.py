"""Medusa heads: head i guesses the token i + 2 positions past the hidden state it reads.

::

    h    hidden state after the final norm, [R, H]              the target's own head predicts token t + 1 from it
    r  = h, then r = r + silu(W r + b) for each block           head i, as many blocks as its file holds
    U r                                                         logits of token t + 2 + i

Two published layouts, told apart by their tensor names: the authors' (``0.0.linear.weight``, ``0.1.weight``, perhaps
after ``medusa_head.``) and vLLM's (``blocks.0.layers.0.weight``, ``lm_heads.0.weight``, a ``token_map`` where the
vocabulary is truncated). Heads and blocks are counted from the names, since published configurations are wrong about
them. A head without its own U uses the target's output head.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, takewhile
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from foresay.verifier.heads.layouts import MEDUSA_NAMES, HeadTensors
from foresay.verifier.heads.reader import fill, known_ids, taken
from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.decoder import Decoder
from foresay.verifier.model.errors import WeightsError
from foresay.verifier.model.fields import Fields
from foresay.verifier.model.layers import ExtraParameters, Stack
from foresay.verifier.model.linear import Linear
from foresay.verifier.model.products import Product
from foresay.verifier.model.quantization import HEAD
from foresay.verifier.model.weights import LayerWeights
from foresay.verifier.ops.rows import finish_logits

#: The factor and the cap of logits.
Finish = tuple[float, float | None]
#: The prefix of heads in one file with the model they were trained with (Medusa-2).
JOINT_PREFIX = "medusa_head."


@dataclass(frozen=True, slots=True)
class MedusaHead:
    """One head: residual blocks and an output matrix, [V', H] (V' the truncated vocabulary, or all of it). finish:
    scale and cap of its logits."""

    blocks: tuple[Linear, ...]
    output: Linear
    finish: Finish

    def __call__(self, hidden: Tensor) -> Tensor:
        """[R, H] -> fp32[R, V']."""
        for block in self.blocks:
            hidden = hidden + functional.silu(block(hidden))
        return finish_logits(self.output.wide(hidden), *self.finish)


class MedusaHeads:
    """All heads of a set. Owns their weights.

    token_map: int64[V'], the target's id of each output row; None if they are the same.
    """

    def __init__(self, heads: list[MedusaHead], token_map: Tensor | None) -> None:
        self.heads, self.token_map, any_one = heads, token_map, heads[0].output
        self.hidden_size, self.dtype, self.device = any_one.in_features, any_one.dtype, any_one.device

    def __len__(self) -> int:
        return len(self.heads)

    @torch.inference_mode()
    def __call__(self, hidden: Tensor, depth: int) -> Tensor:
        """fp32[R, V']: logits of the token ``depth + 2`` positions past each row of ``hidden`` [R, H]."""
        return self.heads[depth](hidden)

    @classmethod
    def load(cls, directory: Path, target: Decoder) -> MedusaHeads:
        """The heads in ``directory``, in the target's dtype. Raises WeightsError or ConfigError, which name the
        file."""
        config, read = Fields.read(directory / "config.json"), HeadTensors.read(directory, prefix=JOINT_PREFIX)
        files = replace(read, tensors={_short(name): tensor for name, tensor in read.tensors.items()})
        drafted = config.integer("truncated_vocab_size", target.config.vocab_size)
        ids, numbers = _token_map(files, drafted, target), _numbers(files)
        outside = ExtraParameters(tuple(_products(files, drafted, target.config)))
        stack = Stack((), target.config.stack.norm, extra=outside, whole=False)
        try:
            found = fill(files, replace(target.config, stack=stack, quantization=None), target).outside
        except WeightsError as error:
            base = config.get("base_model_name_or_path")
            trained = f" (they were trained for {base})" if base else ""
            raise WeightsError(f"{error}; heads fit only the model they were trained for{trained}") from error
        return cls([_head(number, found, ids, config, target) for number in numbers], ids)


def _short(name: str) -> str:
    for pattern, ours in MEDUSA_NAMES:
        name = re.sub(pattern, ours, name)
    return name


def _numbers(files: HeadTensors) -> range:
    numbers = sorted({int(name.partition(".")[0]) for name in files.tensors if name[:1].isdigit()})
    if not numbers:
        raise WeightsError(f"{files.where}: holds no Medusa head (no tensor such as 0.0.linear.weight)")
    if numbers != list(range(len(numbers))):
        raise WeightsError(f"{files.where}: the heads are numbered {numbers}, one is missing")
    return range(len(numbers))


def _token_map(files: HeadTensors, drafted: int, target: Decoder) -> Tensor | None:
    """The map is only used if the configuration says that the vocabulary is truncated, as in vLLM."""
    vocab, where = target.config.vocab_size, files.where
    if drafted >= vocab:
        files.tensors.pop("token_map", None)
        return None
    if (stored := taken(files, "token_map", drafted)) is None:
        raise WeightsError(f"{where}: token_map is missing, but truncated_vocab_size is {drafted}")
    return known_ids(stored.long(), vocab, f"{where}: token_map").to(target.device)


def _products(files: HeadTensors, drafted: int, target: ModelConfig) -> Iterator[Product]:
    """Every block, [H, H], and every output matrix, of the whole vocabulary or of what is drafted."""
    width, there = target.hidden_size, files.tensors
    for name, tensor in there.items():
        module, _, kind = name.rpartition(".")
        if kind == "weight" and module.endswith(".linear"):
            yield Product(module, {module: width}, width, f"{module}.bias" in there)
        elif kind == "weight" and (module[0].isdigit() or module == HEAD):
            whole = len(tensor) == target.vocab_size
            yield Product(module, {module: target.vocab_size if whole else drafted}, width)


def _head(number: int, found: LayerWeights, ids: Tensor | None, config: Fields, target: Decoder) -> MedusaHead:
    """With its own output matrix; or, if it has none, one in the file, head 0's, or the target's."""
    names, first = _blocks(number, found), len(_blocks(0, found))
    blocks = tuple(Linear(found.matrices[name], found.biases.get(name)) for name in names)
    own = f"{number}.{len(names)}", str(number), HEAD, f"0.{first}", "0"
    name = next((name for name in own if name in found.matrices), None)
    scale, stack = config.optional_number("logit_scale"), target.config.stack
    if name is None:
        if ids is not None:
            raise WeightsError("has a token_map, but no output matrix to which it belongs")
        return MedusaHead(blocks, target.head, (scale or stack.logit_scale, stack.logit_cap))
    weight = found.matrices[name]
    mapped = weight[ids] if ids is not None and weight.shape[0] == target.config.vocab_size else weight
    return MedusaHead(blocks, Linear(mapped), (scale or 1.0, None))


def _blocks(number: int, found: LayerWeights) -> list[str]:
    """The names of a head's blocks."""
    return list(takewhile(found.matrices.__contains__, (f"{number}.{block}.linear" for block in count())))
