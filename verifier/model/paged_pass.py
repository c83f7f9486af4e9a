"""The decoder's pass over static rows: the one that a GPU runs, eagerly or captured.

Six launches a layer where a product needs one: the sum of the residual stream is normed where it is formed, heads are
normed, rotated and stored in one go, and the gate is applied where it is multiplied. The CPU's pass
(:class:`~verifier.model.decoder.Decoder`) computes the same function with other ops.

Legend: R rows, H hidden width, V vocabulary, W rows whose logits are wanted.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kvpaging import KVStore
from spec.features import Features
from spec.protocols import FeatureRequest
from verifier.model.decoder import Decoder, Layer
from verifier.ops.norm import add_rms_norm, rms_norm
from verifier.ops.rope import rotate_and_store
from verifier.ops.tree_attention import tree_attention
from verifier.paged_rows import StaticRows


@torch.inference_mode()
def paged_pass(
    decoder: Decoder, rows: StaticRows, store: KVStore, features: FeatureRequest | None = None
) -> tuple[Tensor, Features]:
    """Run the rows through the model, storing their KV.

    Returns fp32[W, V] logits of the wanted rows and the features asked for, each [R, H], padding rows included.
    """
    asked, eps = features or FeatureRequest(), decoder.config.rms_norm_eps
    x = functional.embedding(rows.tokens, decoder.embedding)
    rotation = decoder.rope.rows(rows.positions, x.dtype)
    taken: Features = {}
    norms = [*(layer.input_norm for layer in decoder.layers[1:]), decoder.final_norm]
    normed = rms_norm(x, decoder.layers[0].input_norm, eps)
    for index, (layer, next_norm) in enumerate(zip(decoder.layers, norms, strict=True)):
        if index in asked.layers:
            taken[f"layer.{index}"] = x.clone()
        mixed = attention(decoder, index, layer, normed, rotation, rows, store)
        normed = add_rms_norm(x, layer.output(mixed), layer.post_norm, eps)
        normed = add_rms_norm(x, layer.down(layer.gate_up.gated(normed)), next_norm, eps)
    if len(decoder.layers) in asked.layers:
        taken[f"layer.{len(decoder.layers)}"] = x
    if asked.final:
        taken["final"] = normed
    return _logits(decoder, normed, rows), taken


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
    keys, values = store.keys[index], store.values[index]
    cos, sin = rotation
    query = rotate_and_store(
        layer.qkv(normed),
        cos,
        sin,
        keys,
        values,
        rows.slots,
        layer.query_norm,
        layer.key_norm,
        decoder.config.rms_norm_eps,
    ).contiguous()
    window = decoder.window if layer.windowed else None
    seen = [
        tree_attention(query[group.rows], keys, values, group.paged, decoder.scale, window) for group in rows.groups
    ]
    return (seen[0] if len(seen) == 1 else torch.cat(seen)).flatten(1)


def _logits(decoder: Decoder, normed: Tensor, rows: StaticRows) -> Tensor:
    """fp32[W, V]; at least two rows go through the head."""
    wanted = rows.wanted
    if wanted is None:
        return decoder.head(normed)[: rows.live].float()
    if not len(wanted):
        return normed.new_empty(0, decoder.head.out_features, dtype=torch.float32)
    chosen = normed[wanted if len(wanted) > 1 else wanted.expand(2)]
    return decoder.head(chosen)[: len(wanted)].float()
