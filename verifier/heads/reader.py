"""A head's tensors, read from any published layout and fused for the products.

The embedding and the output matrix are the target's unless the file has its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from foresay.verifier.heads.config import HeadConfig, MarkovConfig
from foresay.verifier.heads.layer import Finish, HeadWeights, MarkovHead
from foresay.verifier.heads.layouts import IGNORED, HeadTensors, short
from foresay.verifier.model.checkpoint import header_names
from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.decoder import Decoder, PackedLayer
from foresay.verifier.model.errors import WeightsError
from foresay.verifier.model.gguf.file import LINK
from foresay.verifier.model.linear import Linear, Matrix
from foresay.verifier.model.nodes import HeadNorm, Layer
from foresay.verifier.model.predicting import LAST, MIXES, mtp_layout
from foresay.verifier.model.products import OUTPUT, QKV, Product, Vector
from foresay.verifier.model.stored import stack_slot
from foresay.verifier.model.weights import LayerWeights
from foresay.verifier.ops.quantized import QuantizedMatrix
from foresay.verifier.ops.records import Norm


def read_weights(directory: Path, config: HeadConfig, target: Decoder) -> HeadWeights:
    """The weights in ``directory``; raises WeightsError, which names the file and the tensor."""
    return weights_of(HeadTensors.read(directory), config, target)


def read_mtp(directory: Path, target: Decoder) -> tuple[HeadConfig, HeadWeights]:
    """The extra layer in the target's own ``directory``; its norms' weights are stored as the target's are."""
    layout = mtp_layout(header_names(directory), target.config)
    less_one = target.config.stack.norm.less_one and not (directory / LINK).is_symlink()
    assert layout is not None, "there is one"
    prefix, config = layout.prefix_of(target.config), HeadConfig.of_mtp(target.config, layout)
    found, tensors = HeadTensors.read(directory, prefix), {f"{LAST}.weight": target.final_norm.weight}
    for name, tensor in found.tensors.items():
        module, _, kind = name.removeprefix(prefix).rpartition(".")
        if (own := layout.ours(module)) is not None:
            lessened = less_one and tensor.dim() == 1 and kind == "weight"
            tensors[f"{own}.{kind}"] = tensor.float() + 1 if lessened else tensor
    if layout.state_first:
        mixes = f"{MIXES}.weight"
        tensors[mixes] = torch.cat(tensors[mixes].chunk(2, dim=1)[::-1], dim=1)
    return config, weights_of(HeadTensors(tensors, found.where), config, target)


def weights_of(read: HeadTensors, config: HeadConfig, target: Decoder) -> HeadWeights:
    """The same from tensors, with the names of any layout."""
    named = {short(name): tensor for name, tensor in read.tensors.items() if not IGNORED.search(name)}
    reader = HeadReader(HeadTensors(named, read.where), config.layer, config.draft_vocab, target)
    embed, fc = reader.embed(config.scales[0]), reader.mixer(2 if config.generation == 1 else len(config.names))
    bias = (reader.take if "fusion_bias" in config.flags else reader.maybe)("fc.bias", reader.hidden)
    layers = tuple(reader.layer(number, config) for number in range(config.layer.num_layers))
    head, finish = reader.head(config.scales[1:])
    sizes, parallel = config.norms(reader.width, list(named)), config.generation == 3 and config.mask is not None
    weights = {name: reader.take(f"{name}.weight", size) for name, size in sizes.items()}
    made = HeadWeights(
        embed, fc, bias, layers, head,
        norms={name.removeprefix("layers.0."): Norm(one, config.layer.rms_norm_eps) for name, one in weights.items()},
        token_ids=reader.token_ids(),
        mask=reader.take("mask_hidden", 1, 1, reader.width * len(config.names)).flatten() if parallel else None,
        markov=None if config.markov is None else reader.markov(config.markov),
        finish=finish,
    )  # fmt: skip
    reader.check_known()
    return made


class HeadReader:
    """Returns tensors by their names here, and records which were requested.

    shape: of the head's layers. vocab: rows of its output matrix.
    """

    def __init__(self, files: HeadTensors, shape: ModelConfig, vocab: int, target: Decoder) -> None:
        self.files, self.shape, self.vocab, self.target = files, shape, vocab, target
        self.hidden, self.width = shape.hidden_size, target.config.hidden_size
        self.known: set[str] = set()

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor with this name and shape."""
        tensor = self.maybe(name, *shape)
        if tensor is None:
            raise WeightsError(f"{self.files.where}: {name} is missing")
        return tensor

    def maybe(self, name: str, *shape: int) -> Tensor | None:
        """The same; None if absent."""
        tensor = self.stored(name, *shape)
        return None if tensor is None else tensor.to(self.target.embedding.device, self.target.dtype)

    def stored(self, name: str, *shape: int) -> Tensor | None:
        """The same, unchanged from the file."""
        self.known.add(name)
        tensor = self.files.tensors.get(name)
        if tensor is not None and tuple(tensor.shape) != shape:
            raise WeightsError(f"{self.files.where}: {name} has shape {list(tensor.shape)}, expected {list(shape)}")
        return tensor

    def check_known(self) -> None:
        """Raise WeightsError for a tensor that was not requested: the head then computes something unsupported."""
        unknown = sorted(set(self.files.tensors) - self.known)
        if unknown:
            more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
            raise WeightsError(f"{self.files.where}: {', '.join(unknown[:3])}{more}: not known in this layout")

    def matrix(self, name: str, outer: int, inner: int) -> Matrix:
        """A weight [O, K] in the target's dtype, or in int8 if ``NAME_scale`` has a scale for each group."""
        scales = self.files.tensors.get(f"{name}_scale")
        if scales is None:
            return self.take(name, outer, inner)
        self.known.add(f"{name}_scale")
        values = self.stored(name, outer, inner)
        grouped = scales.dim() == 2 and len(scales) == outer and inner % scales.shape[1] == 0
        if values is None or values.dtype != torch.int8 or not grouped:
            raise WeightsError(f"{self.files.where}: {name} must be int8 in groups, each with a scale in {name}_scale")
        return QuantizedMatrix(values, scales, None, 8, inner).to(self.target.embedding.device)

    def layer(self, number: int, config: HeadConfig) -> tuple[Layer, PackedLayer]:
        """One layer of EAGLE's or DFlash's. The attention of EAGLE-3's first one reads two states."""
        node = self._node(number, normed=number >= config.first)
        reads = 2 * self.hidden if config.generation == 3 and not number else self.hidden
        return node, self.packed(f"layers.{number}", node, reads)

    def packed(self, name: str, node: Layer, reads: int = 0) -> PackedLayer:
        """The weights of a layer. name: of its tensors, before theirs. reads: how wide attention's input is; 0: as all
        others are."""
        matrices, biases = dict[str, Matrix](), dict[str, Tensor]()
        for product in node.products(self.hidden):
            rows, inner = product.rows, reads if reads and product.name == QKV else product.inner
            if product.experts:
                matrices[product.name] = self._of_experts(name, product)
                continue
            parts = [self.matrix(f"{name}.{module}.weight", outer, inner) for module, outer in rows.items()]
            matrices[product.name] = self._stacked(f"{name}.{next(iter(rows)).partition('.')[0]}", parts)
            if product.name in (QKV, OUTPUT) and (bias := self._bias(name, rows)) is not None:
                biases[product.name] = bias
        vectors = {one.name: self._vector(name, one) for one in node.vectors(self.hidden)}
        return PackedLayer.of(node, LayerWeights(matrices, biases, vectors), self.target.dtype)

    def _vector(self, name: str, one: Vector) -> Tensor:
        found = self.take(f"{name}.{one.name}", *one.shape)
        return found.float() if one.wide else found

    def _of_experts(self, name: str, product: Product) -> Tensor:
        """The matrices of all experts, from one tensor of all or from one of each."""
        whole = self.target.embedding.new_empty(product.outer, product.inner)
        parts = whole.split_with_sizes(list(product.rows.values()))
        turns = [parts[first : first + product.experts] for first in range(0, len(parts), product.experts)]
        there = [how for how in product.stacked if f"{name}.{how.name}" in self.files.tensors]
        for how in there:
            slot = stack_slot(how, [turns[turn] for turn in how.turns])
            slot.put(self.take(f"{name}.{how.name}", *slot.shape))
        for module, part in zip(product.rows, parts, strict=True) if not there else ():
            part.copy_(self.take(f"{name}.{module}.weight", *part.shape))
        return whole

    def _node(self, number: int, normed: bool) -> Layer:
        """Llama's layer with the optional parts that the files have, such as norms of heads."""
        node = self.shape.stack.layers[number]
        if f"layers.{number}.self_attn.q_norm.weight" in self.files.tensors:
            node = replace(node, mixer=replace(node.attention, norm=HeadNorm(node.norm)))
        return node if normed else replace(node, norms=replace(node.norms, before_attention=None))

    def _stacked(self, name: str, parts: list[Matrix]) -> Matrix:
        """Several matrices, concatenated by rows."""
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

    def embed(self, scale: float) -> Tensor:
        """[V, H]: the file's, times ``scale``; else the target's."""
        own = self.maybe("embed_tokens.weight", self.target.config.vocab_size, self.hidden)
        if own is None and self.hidden != self.width:
            raise WeightsError(
                f"{self.files.where}: embed_tokens.weight is missing, and the target's is {self.width} wide where the "
                f"head is {self.hidden}"
            )
        return self.target.embedding if own is None else own if scale == 1.0 else own * scale

    def mixer(self, count: int) -> Matrix | None:
        """[H, F]: the matrix that mixes ``count`` features of the target. None if one of the right width is read as it
        is."""
        hidden, features = self.hidden, self.width * count
        stored = tuple(self.files.tensors["fc.weight"].shape) if "fc.weight" in self.files.tensors else ()
        if not stored and features == hidden:
            return None
        if stored and stored[0] == hidden and stored[1] != features:
            raise WeightsError(
                f"{self.files.where}: fc.weight reads {stored[1]} numbers, but the target gives {count} features of "
                f"{self.width}: the head was made for another model, or reads other layers than its config.json lists"
            )
        return self.matrix("fc.weight", hidden, features)

    def head(self, plain: Finish) -> tuple[Linear, Finish]:
        """The file's matrix; else its embedding, if they are tied; else, for the whole vocabulary, the target's. Also
        scale and cap of its logits: ``plain``, or the target's."""
        target, vocab = self.target.config, self.vocab
        names = ["lm_head.weight"]
        if self.shape.tie_word_embeddings and vocab == target.vocab_size:
            names.append("embed_tokens.weight")
        for name in names:
            if name in self.files.tensors:
                return Linear(self.matrix(name, vocab, self.hidden), None, self.target.dtype), plain
        if (vocab, self.hidden) != (target.vocab_size, self.width):
            raise WeightsError(f"{self.files.where}: lm_head.weight is missing")
        return self.target.head, (target.stack.logit_scale, target.stack.logit_cap)

    def token_ids(self) -> Tensor | None:
        """int64[V'], the target's id of each draft id; None if they are the same.

        A file has their differences (``d2t``) and usually a mask over the target's ids of which are drafted (``t2d``).
        """
        vocab, target, where = self.vocab, self.target.config.vocab_size, self.files.where
        offsets, mask = self.stored("d2t", vocab), self.stored("t2d", target)
        if offsets is None:
            if vocab != target:
                raise WeightsError(f"{where}: d2t is missing, but the draft vocabulary has {vocab} tokens")
            return None
        ids = known_ids(torch.arange(vocab) + offsets.long(), target, f"{where}: d2t")
        if len(ids.unique()) < vocab:
            raise WeightsError(f"{where}: d2t names a token of the target twice")
        if mask is not None and not torch.equal(mask.bool().nonzero().flatten(), ids.sort().values):
            raise WeightsError(f"{where}: d2t and t2d name different tokens of the target")
        return ids.to(self.target.embedding.device) if vocab != target or bool(offsets.any()) else None

    def markov(self, config: MarkovConfig) -> MarkovHead:
        """DSpark's Markov head."""
        rank, name, joint = config.rank, "markov_head.", None
        widths = {"gated": ("gate_proj", rank, self.hidden), "rnn": ("joint_proj", 3 * rank, self.hidden + rank)}
        if config.kind in widths:
            own, outer, features = widths[config.kind]
            weight = self.take(f"{name}{own}.weight", outer, features + rank)
            joint = Linear(weight, self.take(f"{name}{own}.bias", outer))
        before = self.take(f"{name}markov_w1.weight", self.target.config.vocab_size, rank)
        return MarkovHead(config, before, Linear(self.take(f"{name}markov_w2.weight", self.vocab, rank)), joint)


def known_ids(ids: Tensor, vocab: int, what: str) -> Tensor:
    """The ids. Raises WeightsError if one is not among the target's ``vocab`` tokens."""
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
        raise WeightsError(f"{what} names tokens that the target does not have")
    return ids
