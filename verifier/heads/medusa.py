"""Medusa heads: head i guesses the token i + 2 places past the hidden state it reads.

::

    h    hidden state behind the final norm, [R, H]             the target's own head makes token t + 1 of it
    r  = h, then r = r + silu(W r + b) for each block           head i, as many blocks as its file holds
    U r                                                         logits of token t + 2 + i

Two published layouts, told apart by their tensor names: the authors' (``0.0.linear.weight``, ``0.1.weight``, perhaps
behind ``medusa_head.``) and vLLM's (``blocks.0.layers.0.weight``, ``lm_heads.0.weight``, a ``token_map`` where the
vocabulary is truncated). Heads and blocks are counted from the names, since published configurations are wrong about
them. A head without a U of its own uses the target's output head.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from foresay.verifier.heads.files import HeadTensors
from foresay.verifier.model.decoder import Decoder
from foresay.verifier.model.errors import WeightsError
from foresay.verifier.model.fields import Fields
from foresay.verifier.model.linear import Linear

_PREFIX = re.compile(r"^(medusa_heads?\.)+")
_VLLM_BLOCK = re.compile(r"^blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)$")
_VLLM_OUTPUT = re.compile(r"^lm_heads\.(\d+)\.weight$")
_SHARED = "lm_head.weight"
#: How heads begin that lie in one file with the model they were trained with (Medusa-2).
BESIDE_MODEL = "medusa_head."


@dataclass(frozen=True, slots=True)
class MedusaHead:
    """One head: residual blocks and an output matrix, [V', H] (V' the truncated vocabulary, or all of it)."""

    blocks: tuple[Linear, ...]
    output: Linear

    def __call__(self, hidden: Tensor) -> Tensor:
        """[R, H] -> fp32[R, V']."""
        for block in self.blocks:
            hidden = hidden + functional.silu(block(hidden))
        return self.output.wide(hidden)


class MedusaHeads:
    """All heads of a set. Owns their weights.

    token_map: int64[V'], the target's id of each output row; None where they are the same.
    """

    def __init__(self, heads: list[MedusaHead], token_map: Tensor | None, scale: float = 1.0) -> None:
        self.heads, self.token_map, self._scale = heads, token_map, scale

    def __len__(self) -> int:
        return len(self.heads)

    @property
    def hidden_size(self) -> int:
        """H, of the state the heads read."""
        return self.heads[0].output.in_features

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and activations."""
        return self.heads[0].output.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.heads[0].output.device

    @torch.inference_mode()
    def __call__(self, hidden: Tensor, depth: int) -> Tensor:
        """fp32[R, V']: logits of the token ``depth + 2`` places past each row of ``hidden`` [R, H]."""
        logits = self.heads[depth](hidden)
        return logits if self._scale == 1.0 else logits * self._scale

    @classmethod
    def load(cls, directory: Path, target: Decoder) -> MedusaHeads:
        """The heads in ``directory``, in the target's dtype. Raises WeightsError or ConfigError naming the file."""
        return _Loader(directory, target).heads()


class _Loader:
    """Reads one directory; names are the authors', vLLM's are translated."""

    def __init__(self, directory: Path, target: Decoder) -> None:
        self.config = Fields.read(directory / "config.json")
        self.target = target
        read = HeadTensors.read(directory, prefix=BESIDE_MODEL)
        self.files = HeadTensors({_translated(name): tensor for name, tensor in read.tensors.items()}, read.where)
        self._translate_outputs()
        self.token_map = self._token_map()

    def _translate_outputs(self) -> None:
        """vLLM's ``lm_heads.i`` stand behind the blocks of head i, as the authors count."""
        for name in [name for name in self.files.tensors if _VLLM_OUTPUT.match(name)]:
            head = name.split(".")[1]
            self.files.tensors[f"{head}.{self._blocks(head)}.weight"] = self.files.tensors.pop(name)

    def _numbers(self, pattern: str) -> set[int]:
        """The numbers that a pattern's group takes among the tensor names."""
        found = (re.match(pattern, name) for name in self.files.tensors)
        return {int(match[1]) for match in found if match}

    def _blocks(self, head: int | str) -> int:
        """How many residual blocks a head has."""
        return len(self._numbers(rf"^{head}\.(\d+)\.linear\.weight$"))

    def heads(self) -> MedusaHeads:
        known = {"token_map", _SHARED}
        count = self._count()
        heads = [self._head(number, known) for number in range(count)]
        self.files.check_known(known)
        scale = self.config.optional_number("logit_scale") or 1.0
        ids = None if self.token_map is None else self.token_map.to(self.target.embedding.device)
        return MedusaHeads(heads, ids, scale)

    def _count(self) -> int:
        numbers = self._numbers(r"^(\d+)\.\d+\.(?:linear\.)?weight$")
        if not numbers:
            raise WeightsError(f"{self.files.where}: holds no Medusa head (no tensor such as 0.0.linear.weight)")
        if numbers != set(range(len(numbers))):
            raise WeightsError(f"{self.files.where}: the heads are numbered {sorted(numbers)}, one is missing")
        return len(numbers)

    def _head(self, number: int, known: set[str]) -> MedusaHead:
        width = self.target.config.hidden_size
        count = self._blocks(number)
        blocks = []
        for block in range(count):
            weight, bias = f"{number}.{block}.linear.weight", f"{number}.{block}.linear.bias"
            known |= {weight, bias}
            blocks.append(self._linear(self._take(weight, (width, width)), self.files.optional(bias, (width,))))
        name = f"{number}.{count}.weight"
        known.add(name)
        return MedusaHead(tuple(blocks), self._output(name if name in self.files.tensors else self._shared()))

    def _take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        try:
            return self.files.take(name, shape)
        except WeightsError as error:
            base = self.config.get("base_model_name_or_path")
            trained = f" (they were trained for {base})" if base else ""
            raise WeightsError(f"{error}; heads fit only the model they were trained for{trained}") from error

    def _shared(self) -> str | None:
        """The output matrix of heads that have none of their own: one in the file, head 0's, or the target's."""
        first = f"0.{self._blocks(0)}.weight"
        return next((name for name in (_SHARED, first) if name in self.files.tensors), None)

    def _output(self, name: str | None) -> Linear:
        if name is None:
            if self.token_map is not None:
                raise WeightsError(f"{self.files.where}: has a token_map, but no output matrix to which it belongs")
            return self.target.head
        vocab, width = self.target.config.vocab_size, self.target.config.hidden_size
        rows = len(self.files.tensors[name])
        if self.token_map is None or rows == vocab:
            weight = self._take(name, (vocab, width))
            return self._linear(weight if self.token_map is None else weight[self.token_map])
        return self._linear(self._take(name, (len(self.token_map), width)))

    def _token_map(self) -> Tensor | None:
        """Only a set that says its vocabulary is truncated uses its map, as in vLLM."""
        vocab = self.target.config.vocab_size
        stored = self.files.tensors.get("token_map")
        truncated = self.config.integer("truncated_vocab_size", vocab)
        if truncated >= vocab:
            return None
        if stored is None:
            raise WeightsError(f"{self.files.where}: token_map is missing, but truncated_vocab_size is {truncated}")
        ids = self._take("token_map", (truncated,)).long()
        if not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
            raise WeightsError(f"{self.files.where}: token_map names tokens that the target does not have")
        return ids

    def _linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        device, dtype = self.target.embedding.device, self.target.dtype
        return Linear(weight.to(device, dtype), None if bias is None else bias.to(device, dtype))


def _translated(name: str) -> str:
    """A tensor name as the authors' heads have it: without prefix, blocks as ``i.l.linear.weight``."""
    name = _PREFIX.sub("", name)
    block = _VLLM_BLOCK.match(name)
    return f"{block[1]}.{block[2]}.linear.{block[3]}" if block else name
