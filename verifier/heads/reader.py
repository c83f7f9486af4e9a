"""What the layouts of heads with decoder layers have in common: layers, embedding, output matrix, draft vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from foresay.verifier.heads.files import HeadTensors
from foresay.verifier.heads.layer import HeadLayer
from foresay.verifier.heads.vocabulary import token_ids
from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.decoder import Decoder
from foresay.verifier.model.errors import WeightsError
from foresay.verifier.model.linear import Linear, Matrix
from foresay.verifier.model.nodes import OUTPUT, QKV, HeadNorm, Layer
from foresay.verifier.model.weights import LayerWeights
from foresay.verifier.ops.quantized import QuantizedMatrix
from foresay.verifier.ops.records import Norm


class HeadReader:
    """Takes tensors by their short names, as the target has its own, and remembers which were asked for.

    layer: the shape of the head's layers. vocab: rows of its output matrix.
    """

    def __init__(self, files: HeadTensors, layer: ModelConfig, vocab: int, target: Decoder) -> None:
        self.files, self.layer, self.vocab, self.target = files, layer, vocab, target
        self.known: set[str] = set()

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor of that name and shape."""
        self.known.add(name)
        return self.files.take(name, shape).to(self.target.embedding.device, self.target.dtype)

    def maybe(self, name: str, *shape: int) -> Tensor | None:
        """The same, None where absent."""
        self.known.add(name)
        tensor = self.files.optional(name, shape)
        return None if tensor is None else tensor.to(self.target.embedding.device, self.target.dtype)

    def matrix(self, name: str, outer: int, inner: int) -> Matrix:
        """A weight [O, K] in the target's dtype, or in int8 where ``NAME_scale`` has a scale for each group."""
        scales = self.files.tensors.get(f"{name}_scale")
        if scales is None:
            return self.take(name, outer, inner)
        self.known |= {name, f"{name}_scale"}
        values = self.files.take(name, (outer, inner))
        if values.dtype != torch.int8 or scales.dim() != 2 or len(scales) != outer or inner % scales.shape[1]:
            raise WeightsError(f"{self.files.where}: {name} must be int8 in groups, each with a scale in {name}_scale")
        return QuantizedMatrix(values, scales, None, 8, inner).to(self.target.embedding.device)

    def linear(self, weight: Matrix, bias: Tensor | None = None) -> Linear:
        """For inputs of the target's dtype."""
        return Linear(weight, bias, self.target.dtype)

    def norm(self, name: str, size: int) -> Norm:
        """The norm of that name."""
        return Norm(self.take(f"{name}.weight", size), self.layer.rms_norm_eps)

    def head_layer(self, number: int, read: int, normed: bool, first: int) -> HeadLayer:
        """One layer. read: the width that its attention reads. normed: whether a norm of that lies in it. first: see
        :class:`HeadLayer`."""
        name, matrices, biases = f"layers.{number}", dict[str, Matrix](), dict[str, Tensor]()
        node = self._node(number, normed)
        for product in node.products(self.layer.hidden_size):
            rows, inner = product.rows, read if product.name == QKV else product.inner
            parts = [self.matrix(f"{name}.{module}.weight", outer, inner) for module, outer in rows.items()]
            matrices[product.name] = self._stacked(f"{name}.{next(iter(rows)).partition('.')[0]}", parts)
            if product.name in (QKV, OUTPUT) and (bias := self._bias(name, rows)) is not None:
                biases[product.name] = bias
        vectors = {one.name: self.take(f"{name}.{one.name}", one.size) for one in node.vectors(self.layer.hidden_size)}
        return HeadLayer(node, LayerWeights(matrices, biases, vectors), self.target.dtype, number, first)

    def _node(self, number: int, normed: bool) -> Layer:
        """Llama's layer with what the files have of it: norms of heads or none."""
        node = self.layer.stack.layers[number]
        if f"layers.{number}.self_attn.q_norm.weight" in self.files.tensors:
            node = replace(node, attention=replace(node.attention, norm=HeadNorm(node.norm)))
        return node if normed else replace(node, norms=replace(node.norms, before_attention=None))

    def _stacked(self, name: str, parts: list[Matrix]) -> Matrix:
        """Rows of several matrices as one."""
        whole = [part for part in parts if isinstance(part, QuantizedMatrix)]
        if not whole:
            return torch.cat([part for part in parts if isinstance(part, Tensor)])
        if len(whole) < len(parts) or len({part.group for part in whole}) > 1:
            raise WeightsError(f"{self.files.where}: {name}: matrices side by side must be quantised alike")
        return QuantizedMatrix.stacked(whole)

    def _bias(self, name: str, rows: Mapping[str, int]) -> Tensor | None:
        biases = [self.maybe(f"{name}.{module}.bias", size) for module, size in rows.items()]
        present = [bias for bias in biases if bias is not None]
        if present and len(present) < len(biases):
            raise WeightsError(f"{self.files.where}: some of q_proj, k_proj and v_proj have a bias, others have none")
        return torch.cat(present) if present else None

    def embed(self) -> Tensor:
        """[V, H]: the file's, else the target's."""
        vocab, hidden = self.target.config.vocab_size, self.layer.hidden_size
        own = self.maybe("embed_tokens.weight", vocab, hidden)
        if own is None and hidden != self.target.config.hidden_size:
            raise WeightsError(
                f"{self.files.where}: embed_tokens.weight is missing, and the target's is "
                f"{self.target.config.hidden_size} wide where the head is {hidden}"
            )
        return self.target.embedding if own is None else own

    def mixer(self, count: int) -> Matrix:
        """[H, F]: the matrix that mixes so many features of the target."""
        hidden, width = self.layer.hidden_size, self.target.config.hidden_size
        stored = tuple(self.files.tensors["fc.weight"].shape) if "fc.weight" in self.files.tensors else ()
        if stored and stored[0] == hidden and stored[1] != width * count:
            raise WeightsError(
                f"{self.files.where}: fc.weight reads {stored[1]} numbers, but the target gives "
                f"{count} features of {width}: the head was made for another model, or for other "
                "layers (--draft-layers names them)"
            )
        return self.matrix("fc.weight", hidden, width * count)

    def head(self) -> Linear:
        """The file's matrix; else its embedding, if they are tied; else, over the whole vocabulary, the target's."""
        layer, target, vocab = self.layer, self.target.config, self.vocab
        if "lm_head.weight_scale" in self.files.tensors:
            return self.linear(self.matrix("lm_head.weight", vocab, layer.hidden_size))
        own = self.maybe("lm_head.weight", vocab, layer.hidden_size)
        if own is None and layer.tie_word_embeddings and vocab == target.vocab_size:
            own = self.maybe("embed_tokens.weight", vocab, layer.hidden_size)
        if own is not None:
            return Linear(own)
        if (vocab, layer.hidden_size) != (target.vocab_size, target.hidden_size):
            raise WeightsError(f"{self.files.where}: lm_head.weight is missing")
        return self.target.head

    def token_ids(self) -> Tensor | None:
        """int64[V']: see :func:`foresay.verifier.heads.vocabulary.token_ids`."""
        self.known |= {"d2t", "t2d"}
        ids = token_ids(self.files, self.vocab, self.target.config.vocab_size)
        return None if ids is None else ids.to(self.target.embedding.device)
