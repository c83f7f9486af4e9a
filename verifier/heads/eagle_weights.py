"""An EAGLE head's tensors, read from the layouts it is published in and fused for the products.

One layer under three names: ``midlayer.`` (the authors, SpecForge), ``layers.0.`` (speculators, EAGLE-1), either
perhaps behind ``model.``. The embedding, and in EAGLE-1 the output head, are the target's unless the file has its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from verifier.heads.eagle_config import EagleConfig
from verifier.heads.files import HeadTensors
from verifier.model.decoder import Decoder
from verifier.model.errors import WeightsError
from verifier.model.linear import Linear

#: What checkpoints carry and nobody computes with: buffers, the inverse map, parts of the target.
_IGNORED = re.compile(r"(^|\.)(t2d|rotary_emb\.inv_freq|verifier_\w+\.weight)$")
_PREFIX = re.compile(r"^(model\.)?(midlayer\.|layers\.0\.)?")


@dataclass(slots=True)
class EagleWeights:
    """All weights of a head, in the target's dtype.

    embed: [V, H]. fc: [H, F], None where one feature of the right width is read as it is. qkv: [(Hq + 2 Hk) D, 2 H]
    (EAGLE-1: H). head: H to V'. norms: by name. token_ids: int64[V'], the target's id of each draft id; None where
    they are the same.
    """

    embed: Tensor
    fc: Tensor | None
    fc_bias: Tensor | None
    qkv: Tensor
    qkv_bias: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    gate_up: Tensor
    down: Tensor
    head: Linear
    norms: dict[str, Tensor]
    token_ids: Tensor | None

    @classmethod
    def read(cls, directory: Path, config: EagleConfig, target: Decoder) -> EagleWeights:
        """The weights in ``directory``; raises WeightsError naming the file and the tensor."""
        return _Reader(directory, config, target).weights()


class _Reader:
    """Takes tensors by their short names and remembers which were asked for."""

    def __init__(self, directory: Path, config: EagleConfig, target: Decoder) -> None:
        read = HeadTensors.read(directory)
        named = {name: tensor for name, tensor in read.tensors.items() if not _IGNORED.search(name)}
        self.files = HeadTensors({_PREFIX.sub("", name): tensor for name, tensor in named.items()}, read.where)
        self.config, self.target = config, target
        self.known: set[str] = set()

    def weights(self) -> EagleWeights:
        layer = self.config.layer
        hidden, inner = layer.hidden_size, layer.intermediate_size
        q, kv = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        sizes = {"q": q, "k": kv, "v": kv}
        read = hidden * (1 if self.config.generation == 1 else 2)
        made = EagleWeights(
            embed=self._embed(),
            fc=self._fc(),
            fc_bias=self._maybe("fc.bias", hidden),
            qkv=torch.cat([self._take(f"self_attn.{n}_proj.weight", size, read) for n, size in sizes.items()]),
            qkv_bias=self._qkv_bias(sizes),
            o=self._take("self_attn.o_proj.weight", hidden, q),
            o_bias=self._maybe("self_attn.o_proj.bias", hidden),
            gate_up=torch.cat([self._take(f"mlp.{name}_proj.weight", inner, hidden) for name in ("gate", "up")]),
            down=self._take("mlp.down_proj.weight", hidden, inner),
            head=self._head(),
            norms=self._norms(),
            token_ids=self._token_ids(),
        )
        self.files.check_known(self.known)
        return made

    def _take(self, name: str, *shape: int) -> Tensor:
        self.known.add(name)
        return self.files.take(name, shape).to(self.target.dtype)

    def _maybe(self, name: str, *shape: int) -> Tensor | None:
        self.known.add(name)
        tensor = self.files.optional(name, shape)
        return None if tensor is None else tensor.to(self.target.dtype)

    def _embed(self) -> Tensor:
        vocab, hidden = self.target.config.vocab_size, self.config.layer.hidden_size
        own = self._maybe("embed_tokens.weight", vocab, hidden)
        if own is None and hidden != self.target.config.hidden_size:
            raise WeightsError(
                f"{self.files.where}: embed_tokens.weight is missing, and the target's is "
                f"{self.target.config.hidden_size} wide where the head is {hidden}"
            )
        return self.target.embedding if own is None else own

    def _fc(self) -> Tensor | None:
        """The matrix that mixes the features (EAGLE-1: feature and embedding)."""
        hidden, width = self.config.layer.hidden_size, self.target.config.hidden_size
        if self.config.generation == 1:
            return self._take("fc.weight", hidden, 2 * hidden)
        features = width * len(self.config.names)
        self.known.add("fc.weight")
        if "fc.weight" not in self.files.tensors and features == hidden:
            return None
        stored = tuple(self.files.tensors["fc.weight"].shape) if "fc.weight" in self.files.tensors else ()
        if stored and stored[0] == hidden and stored[1] != features:
            raise WeightsError(
                f"{self.files.where}: fc.weight reads {stored[1]} numbers, but the target gives "
                f"{len(self.config.names)} features of {width}: the head was made for another model or for other layers"
            )
        return self._take("fc.weight", hidden, features)

    def _qkv_bias(self, sizes: dict[str, int]) -> Tensor | None:
        biases = [self._maybe(f"self_attn.{name}_proj.bias", size) for name, size in sizes.items()]
        present = [bias for bias in biases if bias is not None]
        if present and len(present) < len(biases):
            raise WeightsError(f"{self.files.where}: some of q_proj, k_proj and v_proj have a bias, others have none")
        return torch.cat(present) if present else None

    def _norms(self) -> dict[str, Tensor]:
        layer, width = self.config.layer, self.target.config.hidden_size
        count = len(self.config.names)
        sizes = {"post_attention_layernorm": layer.hidden_size}
        if self.config.generation == 3:
            sizes |= dict.fromkeys(("input_layernorm", "hidden_norm", "norm"), layer.hidden_size)
        if self.config.fc_input_normed:
            sizes["input_norm"] = width * count
        if self.config.fc_normed:
            sizes |= {f"fc_norm.{index}": width for index in range(count)}
        if "self_attn.q_norm.weight" in self.files.tensors:
            sizes |= {"self_attn.q_norm": layer.head_dim, "self_attn.k_norm": layer.head_dim}
        return {name.removeprefix("self_attn."): self._take(f"{name}.weight", size) for name, size in sizes.items()}

    def _head(self) -> Linear:
        """EAGLE-1, and a head over the whole vocabulary without a matrix of its own, use the target's."""
        vocab, hidden = self.config.draft_vocab, self.config.layer.hidden_size
        own = self._maybe("lm_head.weight", vocab, hidden)
        if own is not None:
            return Linear(own)
        if (vocab, hidden) != (self.target.config.vocab_size, self.target.config.hidden_size):
            raise WeightsError(f"{self.files.where}: lm_head.weight is missing")
        return self.target.head

    def _token_ids(self) -> Tensor | None:
        """The target's ids; the file has their distances from the draft's (``d2t``)."""
        self.known.add("d2t")
        vocab, target = self.config.draft_vocab, self.target.config.vocab_size
        offsets = self.files.optional("d2t", (vocab,))
        if offsets is None:
            if vocab != target:
                raise WeightsError(f"{self.files.where}: d2t is missing, but the draft vocabulary has {vocab} tokens")
            return None
        ids = torch.arange(vocab) + offsets.long()
        if not 0 <= int(ids.min()) <= int(ids.max()) < target:
            raise WeightsError(f"{self.files.where}: d2t names tokens that the target does not have")
        return ids if vocab != target or bool(offsets.any()) else None
