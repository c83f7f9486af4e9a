"""An EAGLE head's tensors, read from the layouts it is published in and fused for the products.

Layers under three names: ``midlayer.`` (the authors, SpecForge), ``layers.0.`` (speculators, EAGLE-1) and
``transformer.`` (speculators' EAGLE-1), any perhaps behind ``model.``. The embedding, and in EAGLE-1 the output head,
are the target's unless the file has its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from verifier.heads.eagle_config import EagleConfig
from verifier.heads.files import HeadTensors
from verifier.heads.layer import LayerWeights
from verifier.heads.vocabulary import token_ids
from verifier.model.decoder import Decoder
from verifier.model.errors import WeightsError
from verifier.model.linear import Linear

#: What checkpoints carry and nobody computes with: buffers, parts of the target.
_IGNORED = re.compile(r"(^|\.)(rotary_emb\.inv_freq|verifier_\w+\.weight)$")
_PREFIX = re.compile(r"^(model\.)*(midlayer|transformer)\.|^(model\.)+")
#: EAGLE-1's further tensors by other names: speculators', and those of the heads that it converts.
_RENAMED = {
    "fusion_fc": "fc",
    "transformer.input_layernorm": "fused_layernorm",
    "hidden_layernorm": "fused_layernorm",
    "embed_layernorm": "embedding_layernorm",
    "lm_head_layernorm": "pre_lm_head_layernorm",
}
_MORE_NORMS = ("embedding_layernorm", "fused_layernorm", "pre_lm_head_layernorm")


@dataclass(slots=True)
class EagleWeights:
    """All weights of a head, in the target's dtype.

    embed: [V, H]. fc: [H, F], None where one feature of the right width is read as it is. head: H to V'. norms: those
    outside the layers, by name. token_ids: int64[V'], the target's id of each draft id; None where they are the same.
    """

    embed: Tensor
    fc: Tensor | None
    fc_bias: Tensor | None
    layers: tuple[LayerWeights, ...]
    head: Linear
    norms: dict[str, Tensor]
    token_ids: Tensor | None

    @classmethod
    def read(cls, directory: Path, config: EagleConfig, target: Decoder) -> EagleWeights:
        """The weights in ``directory``; raises WeightsError naming the file and the tensor."""
        return _Reader(directory, config, target).weights()


def _short(name: str) -> str:
    """A tensor's name without prefixes, its layer as ``layers.0.``."""
    stem, _, kind = name.rpartition(".")
    if stem in _RENAMED:
        return f"{_RENAMED[stem]}.{kind}"
    return _PREFIX.sub(lambda match: "layers.0." if match[2] else "", name)


class _Reader:
    """Takes tensors by their short names and remembers which were asked for."""

    def __init__(self, directory: Path, config: EagleConfig, target: Decoder) -> None:
        read = HeadTensors.read(directory)
        named = {_short(name): tensor for name, tensor in read.tensors.items() if not _IGNORED.search(name)}
        self.files = HeadTensors(named, read.where)
        self.config, self.target = config, target
        self.known: set[str] = set()

    def weights(self) -> EagleWeights:
        made = EagleWeights(
            embed=self._embed(),
            fc=self._fc(),
            fc_bias=self._fc_bias(),
            layers=tuple(self._layer(number) for number in range(self.config.layer.num_layers)),
            head=self._head(),
            norms=self._norms(),
            token_ids=self._token_ids(),
        )
        self.files.check_known(self.known)
        return made

    def _layer(self, number: int) -> LayerWeights:
        """The first layer's attention reads two states in EAGLE-3; those above it are plain."""
        layer, name = self.config.layer, f"layers.{number}"
        hidden, inner = layer.hidden_size, layer.intermediate_size
        q, kv = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        sizes = {"q": q, "k": kv, "v": kv}
        read = hidden * (2 if self.config.generation == 3 and number == 0 else 1)
        gate_up = [self._take(f"{name}.mlp.{part}_proj.weight", inner, hidden) for part in ("gate", "up")]
        return LayerWeights(
            qkv=torch.cat([self._take(f"{name}.self_attn.{n}_proj.weight", size, read) for n, size in sizes.items()]),
            qkv_bias=self._qkv_bias(name, sizes),
            o=self._take(f"{name}.self_attn.o_proj.weight", hidden, q),
            o_bias=self._maybe(f"{name}.self_attn.o_proj.bias", hidden),
            gate_up=torch.cat(gate_up),
            down=self._take(f"{name}.mlp.down_proj.weight", hidden, inner),
            norms=self._layer_norms(name, number),
        )

    def _layer_norms(self, name: str, number: int) -> dict[str, Tensor]:
        layer = self.config.layer
        sizes = {"post_attention_layernorm": layer.hidden_size}
        if number:
            sizes["input_layernorm"] = layer.hidden_size
        found = {norm: self._take(f"{name}.{norm}.weight", size) for norm, size in sizes.items()}
        if f"{name}.self_attn.q_norm.weight" in self.files.tensors:
            for norm in ("q_norm", "k_norm"):
                found[norm] = self._take(f"{name}.self_attn.{norm}.weight", layer.head_dim)
        return found

    def _take(self, name: str, *shape: int) -> Tensor:
        self.known.add(name)
        return self.files.take(name, shape).to(self.target.embedding.device, self.target.dtype)

    def _maybe(self, name: str, *shape: int) -> Tensor | None:
        self.known.add(name)
        tensor = self.files.optional(name, shape)
        return None if tensor is None else tensor.to(self.target.embedding.device, self.target.dtype)

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
                f"{len(self.config.names)} features of {width}: the head was made for another model, or for other "
                "layers (--draft-layers names them)"
            )
        return self._take("fc.weight", hidden, features)

    def _fc_bias(self) -> Tensor | None:
        hidden = self.config.layer.hidden_size
        return self._take("fc.bias", hidden) if self.config.fc_bias else self._maybe("fc.bias", hidden)

    def _qkv_bias(self, name: str, sizes: dict[str, int]) -> Tensor | None:
        biases = [self._maybe(f"{name}.self_attn.{part}_proj.bias", size) for part, size in sizes.items()]
        present = [bias for bias in biases if bias is not None]
        if present and len(present) < len(biases):
            raise WeightsError(f"{self.files.where}: some of q_proj, k_proj and v_proj have a bias, others have none")
        return torch.cat(present) if present else None

    def _norms(self) -> dict[str, Tensor]:
        """Those outside the layers; the first layer's own two of EAGLE-3 are applied before it and stand here too."""
        hidden, width, count = self.config.layer.hidden_size, self.target.config.hidden_size, len(self.config.names)
        if self.config.generation == 1:
            some = self.config.more_norms or any(f"{name}.weight" in self.files.tensors for name in _MORE_NORMS[::2])
            return {name: self._take(f"{name}.weight", hidden) for name in _MORE_NORMS if some}
        sizes = {"layers.0.input_layernorm": hidden, "layers.0.hidden_norm": hidden, "norm": hidden}
        if self.config.fc_input_normed:
            sizes["input_norm"] = width * count
        if self.config.fc_normed:
            sizes |= {f"fc_norm.{index}": width for index in range(count)}
        return {name.removeprefix("layers.0."): self._take(f"{name}.weight", size) for name, size in sizes.items()}

    def _head(self) -> Linear:
        """The file's matrix; else its embedding, if they are tied; else, over the whole vocabulary, the target's."""
        layer, target, vocab = self.config.layer, self.target.config, self.config.draft_vocab
        own = self._maybe("lm_head.weight", vocab, layer.hidden_size)
        if own is None and layer.tie_word_embeddings and vocab == target.vocab_size:
            own = self._maybe("embed_tokens.weight", vocab, layer.hidden_size)
        if own is not None:
            return Linear(own)
        if (vocab, layer.hidden_size) != (target.vocab_size, target.hidden_size):
            raise WeightsError(f"{self.files.where}: lm_head.weight is missing")
        return self.target.head

    def _token_ids(self) -> Tensor | None:
        self.known |= {"d2t", "t2d"}
        ids = token_ids(self.files, self.config.draft_vocab, self.target.config.vocab_size)
        return None if ids is None else ids.to(self.target.embedding.device)
