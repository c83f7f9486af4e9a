"""Recurrent layers over texts and trees alike, and how a path of their nodes is committed: gated delta rules and
Mamba-2 scans, whose heads have states, and short convolutions, which keep only rows.

One order of computation: in fp32, row by row along a path, every sum in a fixed order, so that a prompt in one pass, in
chunks, token by token, and a node of a tree and its commit have equal bits (docs/recurrent.md). A pass reads committed
states and changes none: nodes write records, and states of texts go to other pages (:mod:`foresay.kvpaging.states`).

Legend: R rows, H value heads, G key heads, D width of a key, E of a value, T taps; K = G * D, V = H * E, C = 2 K + V.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from foresay.kvpaging.states import LANES, NODES, LayerStates
from foresay.verifier.ops.eager import op
from foresay.verifier.ops.launch import empty, launch, on_triton, padded, warps
from foresay.verifier.ops.records import AttentionMetadata, DeltaWeights, StateRows

#: Values of a program that remembers on a GPU, which is one warp: its sums are within it, without a barrier for each.
VALUES = 4
#: Added to a sum of squares, before its root divides a key or a query.
NORM_EPS = 1e-6


@op()
def gated_delta(
    mixed: Tensor,
    rates: Tensor,
    weights: DeltaWeights,
    layer: LayerStates,
    rows: StateRows,
    dtype: torch.dtype,
) -> Tensor:
    """The output of a layer's heads for every row, normalised and gated: [R, V] of ``dtype``.

    mixed: fp32[R, C + V], queries, keys and values before the convolution, and gates. rates: fp32[R, 2 H], how much
    each head learns, and how much it forgets; for Mamba-2 fp32[R, H], both: queries and keys are not normalised, values
    are added whatever the state has for their keys, and the heads' output is gated before it is normalised. layer: one
    of a store; states and tails are read where sequences continue, and written where they stop; records are written.
    The output of padding is undefined.
    """
    paged, scan, (_, count_of, tiles, _, lanes) = rows.metadata, weights.scan, layer.states.shape
    heads = mixed.new_zeros(len(mixed), count_of, tiles * lanes)

    def step(row: int, window: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        made = functional.silu((window * weights.taps).sum(0) + (0 if scan is None else scan.bias))
        query, record = (_learned if scan is None else _scanned)(made, rates[row], weights, state)
        state = _stepped(state, record, window.shape[1])
        out = (state * _spread(query, state)[:, None, :, None]).sum(2).flatten(1)
        return out if scan is None else out + scan.skip[:, None] * made[-out.numel() :].view_as(out), record, state

    for begin, end, number in _sequences(paged):
        for row, out in enumerate(
            _outputs(mixed[begin:end, : layer.rows.shape[1]], layer, rows, number, begin, step), begin
        ):
            heads[row] = out
    gates = functional.silu(mixed[:, layer.rows.shape[1] :])
    if scan is not None:
        heads = (heads.flatten(1) * gates).unflatten(1, (scan.parts, -1))
    normed = heads * (heads.square().mean(-1, keepdim=True) + weights.eps).rsqrt()
    if scan is not None:
        return (normed.flatten(1) * weights.norm).to(dtype)
    done = normed * weights.norm * gates.view_as(normed)
    if weights.tiled:
        values, dim = done[0].numel(), layer.states.shape[3]
        groups = (layer.rows.shape[1] - values) // 2 // dim
        done = done.unflatten(1, (groups, -1)).transpose(1, 2)
    return done.flatten(1).to(dtype)


@gated_delta.kernel
def _gated_delta(
    mixed: Tensor,
    rates: Tensor,
    weights: DeltaWeights,
    layer: LayerStates,
    rows: StateRows,
    dtype: torch.dtype,
) -> Tensor:
    (heads, tiles, dim, _), (taps, channels) = layer.states.shape[1:], weights.taps.shape
    number, width, scan, block = len(mixed), tiles * LANES, weights.scan, padded if on_triton(mixed) else int
    keys = (channels - heads * width) // 2
    places, kinds = _places_of(rows)
    part = width if scan is None or on_triton(mixed) else math.gcd(heads * width, 512)
    made, gains, out = (empty((number, size), mixed) for size in (channels, 2 * heads, heads * width))
    sizes = {"HEADS": heads, "KEYS": keys, "DIM": dim, "WIDTH": width, "SCANS": scan is not None}
    bias, skip, parts = (weights.taps, weights.decay, heads) if scan is None else (scan.bias, scan.skip, scan.parts)
    launch(
        "recurrence.convolve_rows", (number, 2 * keys // dim + heads * width // part),
        (mixed, rates, weights.taps, bias, weights.decay, weights.shift, layer.tails, layer.records, layer.rows,
         *places, made, gains, len(rows.pages)),
        {**sizes, **kinds, "PADDED": on_triton(mixed), "TAPS": taps, "PART": part,
         "BLOCK": block(max(dim, part)), "GAINS": block(heads), "SCALE": 1 / math.sqrt(dim)},
        rows.count, rows=True, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    if on_triton(mixed):
        paths, sequences = 1 if rows.metadata.words is None else NODES, len(rows.pages)
        by_rows = paths == NODES and number <= sequences * paths
        launch(
            "recurrence.remember_rows", (number if by_rows else sequences * paths, heads, width // VALUES),
            (made, gains, skip, layer.states, layer.records, *places, out, sequences, paths),
            {**sizes, **kinds, "BY_ROWS": by_rows, "BLOCK": padded(dim), "VALUES": VALUES},
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    else:
        kernels = import_module("foresay.verifier.ops.kernels.cpu.recurrence")
        kernels.remember(made, gains, skip, layer, rows, out, scan is not None)
    done, shared = empty(out.shape, out, dtype), heads * dim // keys if weights.tiled else 1
    width = heads * width // parts
    launch(
        "recurrence.finish_rows", (number, parts), (out, mixed, weights.norm, done, weights.eps),
        {"PARTS": parts, "WIDTH": width, "CHANNELS": channels, "SHARED": shared, "BLOCK": block(width),
         "SCANS": scan is not None},
        rows.count, rows=True, num_warps=warps(width), enable_fp_fusion=False,
    )  # fmt: skip
    return done


@op()
def short_conv(
    mixed: Tensor,
    taps: Tensor,
    layer: LayerStates,
    rows: StateRows,
    dtype: torch.dtype,
) -> Tensor:
    """The output of a short convolution for every row: [R, C] of ``dtype``.

    mixed: fp32[R, 3 C]; the input is the first part times the last, and the output is multiplied by the second. taps:
    fp32[T, C], the current row's last. layer, rows: as above; there are no heads.
    """
    first, second, last = mixed.chunk(3, dim=1)
    let_in, found = first * last, torch.zeros_like(second)

    def step(row: int, window: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (window * taps).sum(0), window.new_empty(0), state

    for begin, end, number in _sequences(rows.metadata):
        for row, out in enumerate(_outputs(let_in[begin:end], layer, rows, number, begin, step), begin):
            found[row] = out
    return (found * second).to(dtype)


@short_conv.kernel
def _short_conv(mixed: Tensor, taps: Tensor, layer: LayerStates, rows: StateRows, dtype: torch.dtype) -> Tensor:
    (number, channels), (places, kinds) = taps.shape, _places_of(rows)
    done, block = empty((len(mixed), channels), mixed, dtype), min(padded(channels), 256)
    launch(
        "recurrence.short_rows", (len(mixed), -(-channels // block)),
        (mixed, taps, layer.tails, layer.rows, *places, done, len(rows.pages)),
        {**kinds, "PADDED": on_triton(mixed), "CHANNELS": channels, "TAPS": number, "BLOCK": block},
        rows.count, rows=True, num_warps=2, enable_fp_fusion=False,
    )  # fmt: skip
    return done


def _places_of(rows: StateRows) -> tuple[tuple[Tensor, ...], dict[str, int | bool]]:
    """The rows as kernel arguments; missing ones are replaced by tensors that are not read."""
    paged, count = rows.metadata, len(rows.pages)
    words = paged.offsets if paged.words is None else paged.words
    text = paged.offsets if paged.is_prefill is None else paged.is_prefill
    kinds = {"TREES": paged.words is not None, "TEXTS": paged.is_prefill is not None}
    given = (paged.offsets, paged.lengths, words, text, rows.pages, rows.stops, rows.nodes)
    return given, {**kinds, "SEQUENCES": padded(count) if on_triton(rows.pages) else count}


def _sequences(paged: AttentionMetadata) -> Iterator[tuple[int, int, int]]:
    """First row, end and number of each."""
    sequences = len(paged.lengths) if paged.sequences is None else int(paged.sequences)
    for number, (begin, end) in enumerate(pairwise(paged.offsets[: sequences + 1].tolist())):
        yield begin, end, number


def _outputs(
    raws: Tensor,
    layer: LayerStates,
    rows: StateRows,
    number: int,
    begin: int,
    step: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]],
) -> list[Tensor]:
    """The output of each row of one sequence. raws: [.., C], before the convolution. step: from a row, the rows of its
    convolution and the state before, returns its output, its record and the state."""
    paged, found = rows.metadata, list[Tensor]()
    text = paged.words is None or (paged.is_prefill is not None and bool(paged.is_prefill[number]))
    source, *targets = rows.pages[number].tolist()
    first = layer.states[source], layer.tails[source]
    after = {-1: first if paged.lengths[number] else (torch.zeros_like(first[0]), torch.zeros_like(first[1]))}
    for row, raw in enumerate(raws):
        node, above = (row, row - 1) if text or paged.words is None else _ends(int(paged.words[begin + row]))
        state, tail = after[above]
        window = torch.cat((tail, raw[None]))
        out, record, state = step(begin + row, window, state)
        after[node] = state, window[1:]
        found.append(out)
        own = node - int(rows.nodes[number])
        if own >= 0:
            layer.records[number * NODES + own], layer.rows[number * NODES + own] = record, raw
        for stop, page in zip(rows.stops[number].tolist(), targets, strict=True):
            if text and row + 1 == stop:
                layer.states[page], layer.tails[page] = after[node]
    return found


def _ends(word: int) -> tuple[int, int]:
    """An ancestor word's own node, and its parent; -1 if there is none."""
    word &= (1 << NODES) - 1
    own = word.bit_length() - 1
    return own, (word ^ 1 << own).bit_length() - 1


def _spread(keys: Tensor, state: Tensor) -> Tensor:
    """[H, D]: each key is repeated for its heads. keys: [G, D]."""
    return keys.repeat_interleave(len(state) // len(keys), dim=0)


def _learned(made: Tensor, rates: Tensor, weights: DeltaWeights, state: Tensor) -> tuple[Tensor, Tensor]:
    """A row's queries, [G, D], and its record. made: [C], after the convolution."""
    heads, _, dim, _ = state.shape
    queries, keys = made[: len(made) - heads * len(weights.norm)].view(2, -1, dim)
    queries, keys = (each * (each.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt() for each in (queries, keys))
    share, forget = rates.chunk(2)
    decay = (weights.decay * functional.softplus(forget + weights.shift)).exp()
    remembered = (state * decay[:, None, None, None] * _spread(keys, state)[:, None, :, None]).sum(2)
    values = made[2 * keys.numel() :].view_as(remembered)
    learned = share.sigmoid()[:, None, None] * (values - remembered)
    return queries * (1 / math.sqrt(dim)), torch.cat((keys.flatten(), learned.flatten(), decay))


def _scanned(made: Tensor, rates: Tensor, weights: DeltaWeights, state: Tensor) -> tuple[Tensor, Tensor]:
    """The same for Mamba-2."""
    heads, tiles, dim, lanes = state.shape
    keys = (len(made) - heads * tiles * lanes) // 2
    step = functional.softplus(rates + weights.shift)
    learned = made[2 * keys :].view(heads, -1) * step[:, None]
    record = torch.cat((made[keys : 2 * keys], learned.flatten(), (weights.decay * step).exp()))
    return made[:keys].view(-1, dim), record


def _stepped(state: Tensor, record: Tensor, channels: int) -> Tensor:
    """The state after a row. state: [H, E / 16, D, 16]."""
    heads, tiles, dim, lanes = state.shape
    if not heads:
        return state
    values = heads * tiles * lanes
    keys, learned, decay = record.split(((channels - values) // 2, values, heads))
    spread = _spread(keys.view(-1, dim), state)[:, None, :, None]
    stepped: Tensor = state * decay[:, None, None, None] + spread * learned.view(heads, tiles, 1, lanes)
    return stepped


@op(cpu="recurrence")
def replay(layers: LayerStates, source: int, destination: int, fresh: bool, sequence: int, path: Tensor) -> None:
    """Advance a text's states along a path of the last pass, in all layers: from one state page to another, or within
    one. No other page is written to.

    layers: of a whole store. fresh: whether the text is at its beginning, and no state is read. sequence: its index in
    the pass. path: int64[N], its nodes.
    """
    for number in range(len(layers.states)):
        layer = LayerStates(*(part[number] for part in layers))
        state, tail = (part[source] * (not fresh) for part in layer[:2])
        for record, row in zip(
            layer.records[sequence * NODES + path], layer.rows[sequence * NODES + path], strict=True
        ):
            state, tail = _stepped(state, record, len(row)), torch.cat((tail[1:], row[None]))
        layer.states[destination], layer.tails[destination] = state, tail


@op(gpu="recurrence")
def replay_paths(
    layers: LayerStates, targets: Tensor, lengths: Tensor, taken: Tensor, paths: Tensor, page_size: int, first: int = 0
) -> None:
    """The same for all sequences of a pass, without the host: a sequence's state goes from one page to another, and
    that at the last page boundary inside its path to a third (:meth:`foresay.kvpaging.states.TextState.commit_pages`).

    targets: [S, 3], these pages. lengths: [S], tokens of each text before. taken, paths: int64[S], int64[S, N], how
    many nodes of each path; 0: nothing is written. first: the index in the pass of the first of the sequences.
    """
    for number, (source, end, boundary) in enumerate(targets.tolist()):
        at, count = int(lengths[number]), int(taken[number])
        inside = max((at + count - 1) // page_size * page_size - at, 0)
        for page, nodes in ((end, count), (boundary, inside)):
            if nodes:
                replay(layers, source, page, not at, first + number, paths[number, :nodes].contiguous())
