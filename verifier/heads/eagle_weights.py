"""An EAGLE head's tensors, read from the layouts it is published in and fused for the products.

Layers under three names: ``midlayer.`` (the authors, SpecForge), ``layers.0.`` (speculators, EAGLE-1) and
``transformer.`` (speculators' EAGLE-1), any perhaps behind ``model.``. The embedding, and in EAGLE-1 the output head,
are the target's unless the file has its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from foresay.verifier.heads.eagle_config import EagleConfig
from foresay.verifier.heads.files import HeadTensors
from foresay.verifier.heads.layer import HeadLayer
from foresay.verifier.heads.reader import HeadReader
from foresay.verifier.model.decoder import Decoder
from foresay.verifier.model.linear import Linear, Matrix
from foresay.verifier.ops.records import Norm

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
    mask: [F], of P-EAGLE, what stands in for features.
    """

    embed: Tensor
    fc: Matrix | None
    fc_bias: Tensor | None
    layers: tuple[HeadLayer, ...]
    head: Linear
    norms: dict[str, Norm]
    token_ids: Tensor | None
    mask: Tensor | None = None

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


class _Reader(HeadReader):
    """By short names, see :func:`_short`."""

    def __init__(self, directory: Path, config: EagleConfig, target: Decoder) -> None:
        read = HeadTensors.read(directory)
        named = {_short(name): tensor for name, tensor in read.tensors.items() if not _IGNORED.search(name)}
        super().__init__(HeadTensors(named, read.where), config.layer, config.draft_vocab, target)
        self.config = config

    def weights(self) -> EagleWeights:
        made = EagleWeights(
            embed=self.embed(),
            fc=self._fc(),
            fc_bias=self._fc_bias(),
            layers=tuple(self._layer(number) for number in range(self.layer.num_layers)),
            head=self.head(),
            norms=self._norms(),
            token_ids=self.token_ids(),
            mask=self._mask(),
        )
        self.files.check_known(self.known)
        return made

    def _layer(self, number: int) -> HeadLayer:
        """The first layer's attention reads two states in EAGLE-3, normed before it; those above it are plain."""
        read = self.layer.hidden_size * (2 if self.config.generation == 3 and number == 0 else 1)
        return self.head_layer(number, read, normed=number > 0, first=1)

    def _mask(self) -> Tensor | None:
        if self.config.mask is None:
            return None
        return self.take("mask_hidden", 1, 1, self.target.config.hidden_size * len(self.config.names)).flatten()

    def _fc(self) -> Matrix | None:
        """The matrix that mixes the features (EAGLE-1: feature and embedding)."""
        hidden, count = self.layer.hidden_size, len(self.config.names)
        if self.config.generation == 1:
            return self.matrix("fc.weight", hidden, 2 * hidden)
        self.known.add("fc.weight")
        if "fc.weight" not in self.files.tensors and self.target.config.hidden_size * count == hidden:
            return None
        return self.mixer(count)

    def _fc_bias(self) -> Tensor | None:
        hidden = self.layer.hidden_size
        return self.take("fc.bias", hidden) if self.config.fc_bias else self.maybe("fc.bias", hidden)

    def _norms(self) -> dict[str, Norm]:
        """Those outside the layers; the first layer's own two of EAGLE-3 are applied before it and stand here too."""
        hidden, width, count = self.layer.hidden_size, self.target.config.hidden_size, len(self.config.names)
        if self.config.generation == 1:
            some = self.config.more_norms or any(f"{name}.weight" in self.files.tensors for name in _MORE_NORMS[::2])
            return {name: self.norm(name, hidden) for name in _MORE_NORMS if some}
        sizes = {"layers.0.input_layernorm": hidden, "layers.0.hidden_norm": hidden, "norm": hidden}
        if self.config.fc_input_normed:
            sizes["input_norm"] = width * count
        if self.config.fc_normed:
            sizes |= {f"fc_norm.{index}": width for index in range(count)}
        return {name.removeprefix("layers.0."): self.norm(name, size) for name, size in sizes.items()}
