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
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from foresay.spec.protocols import Features
from foresay.verifier.heads.layer import Finish
from foresay.verifier.heads.layouts import MEDUSA_NAMES, HeadTensors
from foresay.verifier.heads.reader import HeadReader, known_ids
from foresay.verifier.model.decoder import Decoder
from foresay.verifier.model.errors import WeightsError
from foresay.verifier.model.fields import Fields
from foresay.verifier.model.linear import Linear
from foresay.verifier.ops.rows import finish_logits

_SHARED = "lm_head.weight"
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

    def hits(self, features: Features, wanted: Tensor) -> Tensor:
        """bool[R - 1]: whether the first head, at each position, predicts the target's choice one token later.

        features: of a text's R positions. wanted: int64[R], the target's most likely token after each.
        """
        ids = self(features["final"], 0).argmax(dim=-1).cpu()
        return (ids if self.token_map is None else self.token_map.cpu()[ids])[:-1] == wanted[1:]

    @classmethod
    def load(cls, directory: Path, target: Decoder) -> MedusaHeads:
        """The heads in ``directory``, in the target's dtype. Raises WeightsError or ConfigError, which name the
        file."""
        return _MedusaLoader(directory, target).heads()


def _short(name: str) -> str:
    for pattern, ours in MEDUSA_NAMES:
        name = re.sub(pattern, ours, name)
    return name


class _MedusaLoader:
    """Reads one directory, using the authors' names."""

    def __init__(self, directory: Path, target: Decoder) -> None:
        self.config, self.target, vocab = Fields.read(directory / "config.json"), target, target.config.vocab_size
        read = HeadTensors.read(directory, prefix=JOINT_PREFIX)
        named = {_short(name): tensor for name, tensor in read.tensors.items()}
        self.where, drafted = read.where, self.config.integer("truncated_vocab_size", vocab)
        self.reader = HeadReader(HeadTensors(named, read.where), target.config, drafted, target)
        self.reader.known |= {"token_map", _SHARED}
        blocks = (re.match(r"(\d+)\.\d+\.linear\.weight$", name) for name in named)
        self.blocks = Counter(int(block[1]) for block in blocks if block)
        self.token_map = self._token_map() if drafted < vocab else None

    def heads(self) -> MedusaHeads:
        tensors = self.reader.files.tensors
        numbers = {int(name.partition(".")[0]) for name in tensors if name[:1].isdigit()}
        if not numbers:
            raise WeightsError(f"{self.where}: holds no Medusa head (no tensor such as 0.0.linear.weight)")
        if numbers != set(range(len(numbers))):
            raise WeightsError(f"{self.where}: the heads are numbered {sorted(numbers)}, one is missing")
        try:
            heads = [self._head(number) for number in sorted(numbers)]
        except WeightsError as error:
            base = self.config.get("base_model_name_or_path")
            trained = f" (they were trained for {base})" if base else ""
            raise WeightsError(f"{error}; heads fit only the model they were trained for{trained}") from error
        self.reader.check_known()
        ids = None if self.token_map is None else self.token_map.to(self.target.embedding.device)
        return MedusaHeads(heads, ids)

    def _head(self, number: int) -> MedusaHead:
        width, reader = self.reader.width, self.reader
        names = (f"{number}.{block}.linear" for block in range(self.blocks[number]))
        blocks = (Linear(reader.take(f"{n}.weight", width, width), reader.maybe(f"{n}.bias", width)) for n in names)
        return MedusaHead(tuple(blocks), *self._output(number))

    def _output(self, number: int) -> tuple[Linear, Finish]:
        """Its own output matrix; or, if it has none, one in the file, head 0's, or the target's."""
        tensors, scale = self.reader.files.tensors, self.config.optional_number("logit_scale")
        own = [f"{head}.weight" for one in (number, 0) for head in (f"{one}.{self.blocks[one]}", str(one))]
        name = next((name for name in (*own[:2], _SHARED, *own[2:]) if name in tensors), None)
        if name is None:
            if self.token_map is not None:
                raise WeightsError(f"{self.where}: has a token_map, but no output matrix to which it belongs")
            stack = self.target.config.stack
            return self.target.head, (scale or stack.logit_scale, stack.logit_cap)
        vocab = self.target.config.vocab_size
        whole = self.token_map is None or len(tensors[name]) == vocab
        weight = self.reader.take(name, vocab if whole else self.reader.vocab, self.reader.width)
        mapped = weight[self.token_map] if self.token_map is not None and whole else weight
        return Linear(mapped), (scale or 1.0, None)

    def _token_map(self) -> Tensor:
        """The map is only used if the configuration says that the vocabulary is truncated, as in vLLM."""
        stored = self.reader.stored("token_map", self.reader.vocab)
        if stored is None:
            raise WeightsError(f"{self.where}: token_map is missing, but truncated_vocab_size is {self.reader.vocab}")
        return known_ids(stored.long(), self.target.config.vocab_size, f"{self.where}: token_map")
