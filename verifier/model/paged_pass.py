"""The decoder's pass over static rows: op by op, captured in a GPU's graph, or recorded for a CPU.

A product may be cut into segments; whoever reads it adds them up. The sum of the residual stream is normed where it is
formed, heads are normed, rotated and stored in one go, and the gate is applied where it is multiplied.

Legend: R rows, H hidden width, V vocabulary, W rows whose logits are wanted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foresay.kvpaging import KVStore
from foresay.spec.features import Features
from foresay.spec.protocols import FeatureRequest
from foresay.verifier.model.decoder import Decoder, Layer
from foresay.verifier.model.linear import Linear
from foresay.verifier.ops.linear import Partials
from foresay.verifier.ops.norm import add_rms_norm, embed, rms_norm
from foresay.verifier.ops.rope import rotate_and_store
from foresay.verifier.ops.take import copy_rows, take_rows
from foresay.verifier.ops.tree_attention import tree_attention
from foresay.verifier.paged_rows import StaticRows


@torch.inference_mode()
def paged_pass(
    decoder: Decoder, rows: StaticRows, store: KVStore, features: FeatureRequest | None = None
) -> tuple[Tensor, Features]:
    """Run the rows through the model, storing their KV.

    Returns fp32[W, V] logits of the wanted rows and the features asked for, each [R, H], padding rows included.
    """
    asked, eps, count = features or FeatureRequest(), decoder.config.rms_norm_eps, rows.count
    first, *norms = [*(layer.before_attention for layer in decoder.layers), decoder.final_norm]
    x, normed = embed(decoder.embedding, rows.tokens, first, eps, count)
    rotations, taken = decoder.rotations(rows.positions, count), Features()
    for index, (layer, next_norm) in enumerate(zip(decoder.layers, norms, strict=True)):
        if index in asked.layers:
            taken[f"layer.{index}"] = copy_rows(x, count)
        of_attention, of_mlp = layer.behind or (None, None)
        kept = rows.of_layer(store.is_windowed(index))
        mixed = attention(decoder, index, layer, normed, rotations[index], kept, store)
        normed = add_rms_norm(x, _branch(layer.output, mixed, of_attention, eps, count), layer.before_mlp, eps, count)
        gated = layer.gate_up.gated(normed, count)
        normed = add_rms_norm(x, _branch(layer.down, gated, of_mlp, eps, count), next_norm, eps, count)
    if len(decoder.layers) in asked.layers:
        taken[f"layer.{len(decoder.layers)}"] = x
    if asked.final:
        taken["final"] = normed
    return _logits(decoder, normed, rows), taken


def _branch(product: Linear, x: Tensor, norm: Tensor | None, eps: float, count: Tensor | None) -> Tensor | Partials:
    """What is added to the residual stream: a product, normed where the model does that."""
    return product.unfinished(x, count) if norm is None else rms_norm(product(x, count), norm, eps, count)


def attention(
    decoder: Decoder,
    index: int,
    layer: Layer,
    normed: Tensor,
    rotation: tuple[Tensor, Tensor],
    rows: StaticRows,
    store: KVStore,
) -> Tensor:
    """[R, Q * D]: what every row reads of its text and its path; its own key and value are stored before."""
    keys, values, scales = store.layer(index)
    cos, sin = rotation
    query = rotate_and_store(
        layer.qkv.unfinished(normed, rows.count),
        cos,
        sin,
        keys,
        values,
        rows.slots,
        *layer.of_heads,
        decoder.config.rms_norm_eps,
        rows.count,
        scales,
    )
    return attended(query, (keys, values, scales), rows, decoder.scale, layer.window)


def attended(
    query: Tensor,
    layer: tuple[Tensor, Tensor, Tensor | None],
    rows: StaticRows,
    scale: float,
    window: int | None = None,
    first: int = 0,
) -> Tensor:
    """[R, Q * D]: the attention of all groups of rows (:func:`~foresay.verifier.ops.tree_attention.tree_attention`).

    layer: keys, values and scales, as :meth:`~foresay.kvpaging.store.KVStore.layer` gives them.
    """
    keys, values, scales = layer
    seen = [
        tree_attention(query[group.rows], keys, values, group.paged, scale, window, first, rows.count, scales)
        for group in rows.groups
    ]
    return (seen[0] if len(seen) == 1 else torch.cat(seen)).flatten(1)


def _logits(decoder: Decoder, normed: Tensor, rows: StaticRows) -> Tensor:
    """fp32[W, V]."""
    wanted = rows.wanted
    if wanted is None:
        return decoder.head.wide(normed, rows.count)
    if not len(wanted):
        return normed.new_empty(0, decoder.head.out_features, dtype=torch.float32)
    return decoder.head.wide(take_rows(normed, wanted, rows.wanted_count), rows.wanted_count)
