"""The decoder's pass over static rows: in eager mode, captured in a GPU's graph, or recorded for a CPU.

A product may be cut into segments (split K), which the op that reads it adds up. The residual add and the norm are one
op, as are norm, rotation and storing of heads, and the MLP's gate is fused into its product.

Legend: R rows, H hidden width, V vocabulary, W rows whose logits are requested.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from itertools import count as count_up

import torch
from torch import Tensor

from foresay.kvpaging import KVStore, LayerStates
from foresay.spec.protocols import FeatureRequest, Features
from foresay.verifier.forward_batch import StaticRows
from foresay.verifier.model.decoder import Decoder, PackedLayer
from foresay.verifier.model.feed_forward import MLP, Experts
from foresay.verifier.model.layers import Attention
from foresay.verifier.model.linear import Linear
from foresay.verifier.model.mla import MLA
from foresay.verifier.model.moe import PackedExperts
from foresay.verifier.ops.attention import rotate_and_store, rotate_queries, tree_attention
from foresay.verifier.ops.experts import mixed, route, sort_rows
from foresay.verifier.ops.records import FusedRope, Norm, Rotation, SplitKSums
from foresay.verifier.ops.recurrence import gated_delta, short_conv
from foresay.verifier.ops.rows import add_norm, copy_rows, embed, finish_logits, gate_heads, norm, take_rows

#: Embeddings of a pass's rows: see :func:`run_layers`.
Embedded = Tensor | tuple[Tensor, Tensor] | None


@torch.inference_mode()
def forward(
    decoder: Decoder,
    rows: StaticRows,
    store: KVStore,
    features: FeatureRequest | None = None,
    active: list[Tensor] | None = None,
    embedded: Embedded = None,
) -> tuple[Tensor, Features]:
    """Run the rows through the model, storing their KV: :func:`run_layers`, and logits.

    active: of each mixture, int64[..] is appended whose first number is how many of its experts had rows. Returns
    fp32[W, V] logits of the requested rows and the requested features, each [R, H], including padding rows; the final
    states [W, H], if ``rows.sampled`` alone go through the last layers.
    """
    requested, captured = features or FeatureRequest(), dict[str, Tensor]()
    normed, _, rows = run_layers(decoder, rows, store, embedded, requested.layers, captured, active)
    return _logits(decoder, normed, rows), captured | ({"final": normed} if requested.final else {})


def run_layers(
    decoder: Decoder,
    rows: StaticRows,
    store: KVStore,
    embedded: Embedded = None,
    feature_layers: Container[int] = (),
    captured: dict[str, Tensor] | None = None,
    active: list[Tensor] | None = None,
    narrow: bool = False,
) -> tuple[Tensor, Tensor, StaticRows]:
    """The output of the last norm, if there is one, the stream before it, [R, H] each, and the rows that these are of.

    embedded: [R, H], the rows' embeddings, which are changed; or these, and what the first layer reads instead of their
    norm; None: those of their tokens. feature_layers: those whose input is put into ``captured``. narrow: after the
    last layer's attention only rows with logits go on.
    """
    count, stack = rows.count, decoder.config.stack
    first, *norms = [*(layer.before_attention for layer in decoder.layers), decoder.final_norm]
    x, normed = _embedded(decoder, rows, first, embedded)
    inputs = decoder.inputs(x, rows.tokens, count)
    rotations, turns = decoder.rotations(rows.positions, count), count_up()
    states = iter(()) if store.states is None else iter(store.states)
    for index, (node, layer, next_norm) in enumerate(zip(stack.layers, decoder.layers, norms, strict=True)):
        if captured is not None and index in feature_layers:
            captured[f"layer.{index}"] = copy_rows(x, count)
        if rows.sampled is not None and index == stack.num_kv_layers:
            x, normed = _sampled(x, rows), _sampled(normed, rows)
            inputs = None if inputs is None else _sampled(inputs, rows)
            rows, count = rows.sampled, rows.logits_count
            if not len(normed):
                break
            rotations = decoder.rotations(rows.positions, count)
        if isinstance(node.mixer, MLP | Experts):
            normed = add_norm(x, feed_forward(layer, normed, rows, active), next_norm, count, node.residual_mul)
            continue
        if isinstance(node.mixer, Attention):
            source = index if node.mixer.source is None else node.mixer.source
            kept = rows.for_layer(store.pages(source) is store.windows, node.mixer.causal)
            seen = attention(node.mixer, layer, normed, rotations[next(turns)], kept, store.layer(source))
        else:
            seen = recurrence(layer, normed, rows, next(states))
        if node.scan is not None and layer.scan is not None:
            _add_scan(x, layer.scan, normed, rows, next(states), node.scan[1])
        if narrow and index == len(norms) - 1 and rows.logits_indices is not None:
            x, seen, rows = _sampled(x, rows), _sampled(seen, rows), _of_logits(rows, layer)
            count = rows.count
            if not len(x):
                return x, x, rows
        x = _own(x)
        behind = None if node.parallel else next_norm if node.mlp is None else layer.before_mlp
        added = add_norm(x, _branch(layer.output, seen, layer.after_attention, count), behind, count, node.residual_mul)
        normed = normed if node.parallel else added
        del seen  # its memory is used again
        if node.mlp is not None:
            branch, own, x = feed_forward(layer, normed, rows, active, x), (inputs, index), _own(x)
            normed = _ended(x, branch, node.mlp_residual_mul, layer, next_norm, own, count)
    if captured is not None and len(norms) in feature_layers:
        captured[f"layer.{len(norms)}"] = x
    return normed, x, rows


def _own(x: Tensor) -> Tensor:
    """The stream, which is then changed: in training a copy, since a norm's derivative reads what it has read."""
    return x.clone() if x.requires_grad else x


def _sampled(every: Tensor, rows: StaticRows) -> Tensor:
    """[W, ..]: of the rows those with logits. every: [R, ..]."""
    assert rows.logits_indices is not None, "some have none"
    return take_rows(every, rows.logits_indices, rows.logits_count)


def _of_logits(rows: StaticRows, layer: PackedLayer) -> StaticRows:
    """The rows with logits, for what follows a layer's attention: only experts read slots."""
    slots = rows.slots if layer.experts is None else _sampled(rows.slots, rows)
    return replace(rows, slots=slots, count=rows.logits_count, logits_indices=None, logits_count=None)


def _ended(
    x: Tensor,
    branch: Tensor | SplitKSums,
    share: float,
    layer: PackedLayer,
    above: Norm | None,
    own: tuple[Tensor | None, int],
    count: Tensor | None,
) -> Tensor:
    """[R, H]: the input of what is above. branch: the MLP's output, of which a share is added. own: what layers read of
    embeddings of their own, if they do, and the number of this one."""
    inputs, number = own
    if layer.embedding is not None and inputs is not None:
        add_norm(x, branch, None, count, share)
        branch, share = layer.embedding(x, inputs, number, count), 1.0
    return add_norm(x, branch, above, count, share, layer.scalar)


def _embedded(decoder: Decoder, rows: StaticRows, first: Norm | None, embedded: Embedded) -> tuple[Tensor, Tensor]:
    """Each [R, H]: the rows' embeddings, or what is given for them, and these normed for the first layer."""
    if isinstance(embedded, tuple):
        return embedded
    if embedded is not None:
        return embedded, embedded if first is None else norm(embedded, first, rows.count)
    x, normed = embed(decoder.embedding, rows.tokens, decoder.embedding_norm or first, rows.count)
    if decoder.embedding_norm is None:
        return x, normed
    return normed, normed if first is None else norm(normed, first, rows.count)


def _add_scan(
    x: Tensor, layer: PackedLayer, normed: Tensor, rows: StaticRows, states: LayerStates, share: float
) -> None:
    """Add a recurrence that has the same input as a layer's attention."""
    out = recurrence(layer, normed, rows, states)
    add_norm(x, _branch(layer.output, out, None, rows.count), None, rows.count, share)


def recurrence(layer: PackedLayer, normed: Tensor, rows: StaticRows, states: LayerStates) -> Tensor:
    """[R, V]: a recurrent layer's output; its state is read from and written to ``states``."""
    assert rows.states is not None, "a recurrent layer"
    mixed, more = layer.qkv.wide(normed, rows.count), (states, rows.states, normed.dtype)
    if layer.taps is not None:
        return short_conv(mixed, layer.taps, *more)
    assert layer.delta is not None and layer.head_gate is not None, "heads have rates"
    rates, scan = layer.head_gate.wide(normed, rows.count), layer.delta.scan
    rates = rates if scan is None else finish_logits(rates, scan.step, None, rows.count)
    return gated_delta(mixed, rates, layer.delta, *more)


def feed_forward(
    layer: PackedLayer, normed: Tensor, rows: StaticRows, active: list[Tensor] | None, x: Tensor | None = None
) -> Tensor | SplitKSums:
    """[R, H]: the output of an MLP, or of experts, for normalised rows. x: the stream, which experts beside an MLP
    read."""
    count = rows.count
    if layer.dense_mlp is not None and layer.experts is not None:
        assert x is not None, "experts read it"
        (into, back), own = layer.dense_mlp.products, layer.dense_mlp
        dense = norm(back(into.gated(normed, count), count), own.after_dense, count)
        read = norm(x, own.before_experts, count)
        routed = read if layer.experts.reads is None else norm(x, layer.experts.reads, count)
        found = experts(layer, layer.experts, read, count, rows.slots, active, routed)
        return add_norm(dense, norm(found, own.after_experts, count), layer.after_mlp, count)
    if layer.experts is not None:
        found = experts(layer, layer.experts, normed, count, rows.slots, active)
        return found if layer.after_mlp is None else norm(found, layer.after_mlp, count)
    into, back = layer.feed_forward
    return _branch(back, into.gated(normed, count), layer.after_mlp, count)


def experts(
    layer: PackedLayer,
    own: PackedExperts,
    normed: Tensor,
    count: Tensor | None,
    slots: Tensor | None = None,
    active: list[Tensor] | None = None,
    routed: Tensor | None = None,
) -> Tensor:
    """[R, H]: the output of each row's experts and the shared one. slots: int64[R], 0 of padding; None: none is.
    routed: what the router reads; None: the same."""
    routed = normed if routed is None else routed
    logits = own.router.wide(routed, count)
    if own.remainder is not None:
        logits = logits + own.remainder.wide(routed, count)
    chosen, weights = route(logits, own.routing, own.correction, count, slots, own.factors)
    copies, rows = sort_rows(normed, chosen, own.routing, count)
    if active is not None:
        active.append(rows.spans)
    into, back = layer.feed_forward
    parts = back.per_expert(into.per_expert(copies, rows), rows, torch.float32)
    if own.shared is None:
        return mixed(parts, weights, rows.positions, normed.dtype, count=count)
    into, back = own.shared
    shared, gate = back.wide(into.gated(normed, count), count), logits if own.gated else None
    return mixed(parts, weights, rows.positions, normed.dtype, shared, gate, count)


def _branch(product: Linear, x: Tensor, how: Norm | None, count: Tensor | None) -> Tensor | SplitKSums:
    """The term to add to the residual stream: a product, normalised if the model does that."""
    return product.split_k(x, count) if how is None else norm(product(x, count), how, count)


def attention(
    node: Attention,
    layer: PackedLayer,
    normed: Tensor,
    rotation: Rotation,
    rows: StaticRows,
    stored: tuple[Tensor, Tensor, Tensor | None],
) -> Tensor:
    """[R, Q * D]: the attention of every row over its text and its path; its own key and value are stored first,
    unless it reads those of an earlier layer, which stored them.

    stored: keys, values and scales, as :meth:`~foresay.kvpaging.store.KVStore.layer` returns them.
    """
    query: Tensor | FusedRope
    if node.source is None:
        later = len(rows.groups) == 1 and rows.groups[0].metadata.fuse_rope
        query = project_and_store(node, layer, normed, rotation, rows.slots, stored, rows.count, later)
    else:
        query = rotate_queries(layer.qkv.split_k(normed, rows.count), rotation, layer.qk_norms, rows.count)
    seen = attend(query, stored, rows, node, layer.sinks)
    if layer.mla is not None:
        return layer.mla.values.per_head(seen, rows.count)
    gate = layer.head_gate
    return seen if gate is None else gate_heads(seen, gate.split_k(normed, rows.count), rows.count)


def project_and_store(
    node: Attention,
    layer: PackedLayer,
    normed: Tensor,
    rotation: Rotation,
    slots: Tensor,
    stored: tuple[Tensor, Tensor, Tensor | None],
    count: Tensor | None = None,
    later: bool = False,
) -> Tensor | FusedRope:
    """[R, Q, D]: the queries of the rows; stores their keys and values in their slots. later: whether attention
    may do it: it does where nothing is summed or rounded on the way, in heads that a tile holds whole."""
    if layer.mla is not None:
        return layer.mla.project_and_store(layer.qkv, normed, rotation, slots, stored[0], count)
    made, norms = layer.qkv.split_k(normed, count), layer.qk_norms
    plain = norms is None and stored[2] is None and rotation.query_factor is None and not node.values_from_keys
    if later and plain and stored[0].shape[-1] in (16, 32, 64, 128):
        return FusedRope(made, rotation, slots)
    return rotate_and_store(made, rotation, stored, slots, norms, count, node.values_from_keys)


def attend(
    query: Tensor | FusedRope,
    stored: tuple[Tensor, Tensor, Tensor | None],
    rows: StaticRows,
    node: Attention,
    sinks: Tensor | None,
) -> Tensor:
    """[R, Q * D]: the attention of all groups of rows (:func:`~foresay.verifier.ops.attention.tree_attention`)."""
    keys, values, scales = stored
    if rows.dense is not None:
        return rows.dense(query, keys, values, node, sinks)
    shared = node.kv_lora_rank if isinstance(node, MLA) else 0
    how = node.scale, node.window, node.first, rows.count, scales, node.softcap, sinks, shared
    own = [query if isinstance(query, FusedRope) else query[group.rows] for group in rows.groups]
    seen = [tree_attention(q, keys, values, group.metadata, *how) for q, group in zip(own, rows.groups, strict=True)]
    return (seen[0] if len(seen) == 1 else torch.cat(seen)).flatten(1)


def _logits(decoder: Decoder, normed: Tensor, rows: StaticRows) -> Tensor:
    """fp32[W, V]."""
    if (wanted := rows.logits_indices) is None:
        return logits_of(decoder, normed, rows.count)
    return logits_of(decoder, _sampled(normed, rows) if len(wanted) else normed[:0], rows.logits_count)


def logits_of(decoder: Decoder, normed: Tensor, count: Tensor | None = None) -> Tensor:
    """fp32[W, V], from the last norm's output, [W, H]. count: see :func:`~foresay.verifier.ops.rows.take_rows`."""
    if not len(normed):
        return normed.new_empty(0, decoder.head.out_features, dtype=torch.float32)
    stack = decoder.config.stack
    return finish_logits(decoder.head.wide(normed, count), stack.logit_scale, stack.logit_cap, count)
