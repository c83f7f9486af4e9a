"""A head's tensors, read from any published layout into the parameters of its description.

The embedding and the output matrix are the target's unless the file has its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from foresay.verifier.heads.config import MTP, HeadConfig, with_layers
from foresay.verifier.heads.layouts import HeadTensors
from foresay.verifier.model.checkpoint import header_names
from foresay.verifier.model.config import FINAL_NORM, ModelConfig
from foresay.verifier.model.decoder import Decoder, Packed, PackedLayer, norm_of
from foresay.verifier.model.errors import WeightsError
from foresay.verifier.model.layers import BEFORE, ExtraParameters, Layer, QKNorm
from foresay.verifier.model.linear import Linear
from foresay.verifier.model.mtp_layout import EMBEDDING, MIXES, mtp_layout
from foresay.verifier.model.products import OUTPUT, QKV, Product
from foresay.verifier.model.quantization import HEAD, Format, Quantization, Scheme
from foresay.verifier.model.weight_loader import Mismatch
from foresay.verifier.model.weights import EMBEDDING as TOKENS
from foresay.verifier.model.weights import LM_HEAD, LayerWeights, ModelWeights, allocate, make_whole, slots

_EMBED = TOKENS.removesuffix(".weight")


@dataclass(slots=True)
class HeadWeights:
    """All weights of a head, in the target's dtype, including those shared with it.

    model: its description, with what only its files say. outside: the tensors of its ``ExtraParameters``. token_ids:
    int64[V'], the target's id of each draft id; None if they are the same.
    """

    model: ModelConfig
    packed: Packed
    outside: LayerWeights
    token_ids: Tensor | None


def read_weights(directory: Path, config: HeadConfig, target: Decoder) -> HeadWeights:
    """The weights in ``directory``; raises WeightsError, which names the file and the tensor."""
    return weights_of(HeadTensors.read(directory), config, target)


def read_mtp(directory: Path, target: Decoder) -> tuple[HeadConfig, HeadWeights]:
    """The extra layer in the target's own ``directory``."""
    layout = mtp_layout(header_names(directory), target.config)
    assert layout is not None, "there is one"
    prefix, config = layout.prefix_of(target.config), HeadConfig.of_mtp(target.config, layout)
    found, tensors = HeadTensors.read(directory, prefix), dict[str, Tensor]()
    for name, tensor in found.tensors.items():
        module, _, kind = name.removeprefix(prefix).rpartition(".")
        if (own := layout.ours(module)) is not None:
            tensors[f"{own}.{kind}"] = tensor
    if layout.state_first:
        mixes = f"{MIXES}.weight"
        tensors[mixes] = torch.cat(tensors[mixes].chunk(2, dim=1)[::-1], dim=1)
    return config, weights_of(replace(found, tensors=tensors), config, target)


def weights_of(read: HeadTensors, config: HeadConfig, target: Decoder) -> HeadWeights:
    """The same from tensors, with the names of any layout."""
    files, vocab = read.renamed(), target.config.vocab_size
    token_ids = _token_ids(files, config.draft_vocab, target)
    tied = config.layer.tie_word_embeddings and config.draft_vocab == vocab and TOKENS in files.tensors
    model = _described(files, config, target, LM_HEAD in files.tensors or tied)
    found = fill(files, model, target)
    matrices = found.outside.matrices
    head = target.head
    if HEAD in matrices or tied:
        head = Linear(matrices.get(HEAD, matrices.get(_EMBED)), None, target.dtype)  # type: ignore[arg-type]
    embed = matrices.get(_EMBED, target.embedding)
    assert isinstance(embed, Tensor), "embeddings are floats"
    scale = config.scales[0] if _EMBED in matrices else 1.0
    packed = pack(model, found, embed if scale == 1.0 else embed * scale, head)
    if MTP in config.flags:
        packed.final_norm = packed.final_norm or target.final_norm
    return HeadWeights(model, packed, found.outside, token_ids)


def fill(files: HeadTensors, model: ModelConfig, target: Decoder) -> ModelWeights:
    """The parameters of a stack, on the target's device. Raises WeightsError, which names the file and the tensor,
    unless the files have just these."""
    weights, there = allocate(model, target.dtype, target.device), files.tensors
    found = slots(model, weights, there)
    if missing := [name for name in found if name not in there]:
        raise WeightsError(f"{files.where}: {missing[0]} is missing")
    if unknown := sorted(set(there) - set(found)):
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        raise WeightsError(f"{files.where}: {', '.join(unknown[:3])}{more}: not known in this layout")
    for name, slot in found.items():
        _check_shape(files, name, slot.shape)
        try:
            slot.put(there[name])
        except Mismatch as error:
            raise WeightsError(f"{files.where}: {name} {error}") from error
    if not files.gguf:
        make_whole(model, weights)
    return weights


def pack(model: ModelConfig, weights: ModelWeights, embed: Tensor, head: Linear) -> Packed:
    """A stack's layers and last norm, if it has one of its own, between these."""
    both, vectors, name = zip(model.stack.layers, weights.layers, strict=True), weights.outside.vectors, FINAL_NORM
    own = vectors.get(f"{name}.weight")
    last = None if own is None else norm_of(model.stack.norm, name, vectors, own)
    return Packed(embed, [PackedLayer.pack(node, held, embed.dtype) for node, held in both], last, head)


def _check_shape(files: HeadTensors, name: str, shape: tuple[int, ...]) -> None:
    if (found := tuple(files.tensors[name].shape)) != shape:
        raise WeightsError(f"{files.where}: {name} has shape {list(found)}, expected {list(shape)}")


def _described(files: HeadTensors, config: HeadConfig, target: Decoder, own: bool) -> ModelConfig:
    """Its description, with what only files say. own: whether it has an output matrix."""
    layer, stack, there = config.layer, config.layer.stack, files.tensors
    layers = [_with_parts(node, f"model.layers.{number}.", files) for number, node in enumerate(stack.layers)]
    names = (f"{EMBEDDING}.weight", f"{FINAL_NORM}.weight")
    if config.generation == 1 and ("layernorms" in config.flags or any(name in there for name in names)):
        norms = replace(layers[0].norms, before_attention=BEFORE.before_attention)
        layers[0] = replace(layers[0], norms=norms)
    if not own and (config.draft_vocab, layer.hidden_size) != (target.config.vocab_size, target.config.hidden_size):
        raise WeightsError(f"{files.where}: {LM_HEAD} is missing")
    shared = target.config.stack
    scale, cap = config.scales[1:] if own else (shared.logit_scale, shared.logit_cap)
    config = replace(config, layer=with_layers(layer, layers))
    vectors = config.vectors(target.config.hidden_size, there)
    outside = ExtraParameters(tuple(_products(files, config, target)), tuple(vectors))
    stack = replace(config.layer.stack, extra=outside, whole=False, logit_scale=scale, logit_cap=cap)
    return replace(layer, stack=stack, quantization=_quantization(files))


def _with_parts(node: Layer, prefix: str, files: HeadTensors) -> Layer:
    """Llama's layer with the optional parts that the files have: norms of heads, biases."""
    attention, there = node.attention, files.tensors
    if f"{prefix}self_attn.q_norm.weight" in there:
        attention = replace(attention, norm=QKNorm(node.norm))
    own = (each for each in node.products(0) if each.name in (QKV, OUTPUT))
    biases = tuple(each.name for each in own if any(f"{prefix}{module}.bias" in there for module in each.rows))
    return replace(node, mixer=replace(attention, biases=biases))


def _products(files: HeadTensors, config: HeadConfig, target: Decoder) -> Iterator[Product]:
    """Those outside layers."""
    hidden, width, there = config.layer.hidden_size, target.config.hidden_size, files.tensors
    if hidden != width and TOKENS not in there:
        raise WeightsError(
            f"{files.where}: embed_tokens.weight is missing, and the target's is {width} wide where the head is "
            f"{hidden}"
        )
    count = 2 if config.generation == 1 else len(config.names)
    stored = tuple(there["fc.weight"].shape) if "fc.weight" in there else ()
    if stored and stored[0] == hidden and stored[1] != count * width:
        raise WeightsError(
            f"{files.where}: fc.weight reads {stored[1]} numbers, but the target gives {count} features of "
            f"{width}: the head was made for another model, or reads other layers than its config.json lists"
        )
    if stored or count * width != hidden:
        yield Product(MIXES, {MIXES: hidden}, count * width, "fusion_bias" in config.flags or "fc.bias" in there)
    if TOKENS in there:
        yield Product(_EMBED, {_EMBED: target.config.vocab_size}, hidden)
    if LM_HEAD in there:
        yield Product(HEAD, {HEAD: config.draft_vocab}, hidden)
    if config.markov is not None:
        yield from config.markov.products(target.config.vocab_size, config.draft_vocab, hidden)


def _quantization(files: HeadTensors) -> Quantization | None:
    """Of those matrices that have scales."""
    named = dict[str, Scheme]()
    for name, scales in files.tensors.items():
        if not name.endswith(".weight_scale"):
            continue
        weight = name.removesuffix("_scale")
        values = files.tensors.get(weight)
        fits = values is not None and scales.dim() == values.dim() == 2 and len(scales) == len(values)
        if values is None or values.dtype != torch.int8 or not fits or values.shape[1] % scales.shape[1]:
            raise WeightsError(f"{files.where}: {weight} must be int8 in groups, each with a scale in {name}")
        named[weight.removesuffix(".weight")] = Scheme(8, values.shape[1] // scales.shape[1], True, Format.INTEGERS)
    return Quantization(Format.INTEGERS, (), named=named) if named else None


def taken(files: HeadTensors, name: str, size: int) -> Tensor | None:
    """A list of numbers that is no parameter, taken out of the tensors; None if absent."""
    if name not in files.tensors:
        return None
    _check_shape(files, name, (size,))
    return files.tensors.pop(name)


def _token_ids(files: HeadTensors, vocab: int, target: Decoder) -> Tensor | None:
    """int64[V'], the target's id of each draft id; None if they are the same.

    A file has their differences (``d2t``) and usually a mask over the target's ids of which are drafted (``t2d``).
    """
    every, where = target.config.vocab_size, files.where
    offsets, mask = taken(files, "d2t", vocab), taken(files, "t2d", every)
    if offsets is None:
        if vocab != every:
            raise WeightsError(f"{where}: d2t is missing, but the draft vocabulary has {vocab} tokens")
        return None
    ids = known_ids(torch.arange(vocab) + offsets.long(), every, f"{where}: d2t")
    if len(ids.unique()) < vocab:
        raise WeightsError(f"{where}: d2t names a token of the target twice")
    if mask is not None and not torch.equal(mask.bool().nonzero().flatten(), ids.sort().values):
        raise WeightsError(f"{where}: d2t and t2d name different tokens of the target")
    return ids.to(target.device) if vocab != every or bool(offsets.any()) else None


def known_ids(ids: Tensor, vocab: int, what: str) -> Tensor:
    """The ids. Raises WeightsError if one is not among the target's ``vocab`` tokens."""
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
        raise WeightsError(f"{what} names tokens that the target does not have")
    return ids
