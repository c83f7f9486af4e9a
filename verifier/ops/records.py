"""Shared by ops and their kernels: the records that they take and return, and a few limits.

It is separate from the ops since those import their kernels. Letters for sizes are those of the op's file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from foresay.spec.sampling import SamplingParams

#: A product's activation: none; ``act(gate) * up`` of its halves, act being ``x * sigmoid(x)`` or GELU with the tanh
#: approximation; gpt-oss's with halves clamped at 7, ``(up + 1) * gate * sigmoid(1.702 * gate)``; or, of all of it,
#: ``relu(x) ** 2``.
Gate = Literal["", "silu", "gelu", "relu2", "clamped"]


def gate_parts(gated: Gate) -> int:
    """How many outputs of a product become one number: two if one is the other's gate."""
    return 2 if gated in ("silu", "gelu", "clamped") else 1


@dataclass(frozen=True, slots=True)
class SplitKSums:
    """A product [R, O] whose segments still have to be added: in order, then the bias; then it is rounded.

    sums: fp32[segments, R, O]; [1, R, O] if they were added already. bias: [O] or None. segments: how many the weight
    is cut into; 0: as many as there are sums.
    """

    sums: Tensor
    bias: Tensor | None
    segments: int = 0

    def reduce(self, dtype: torch.dtype) -> Tensor:
        """[R, O]."""
        total = self.sums[0]
        for segment in self.sums[1:]:
            total = total + segment
        return (total if self.bias is None else total + self.bias.float()).to(dtype)


@dataclass(frozen=True, slots=True)
class Norm:
    """The norm of rows, with its weights.

    weight: [D], of the rows' dtype, to which a row is rounded before it is multiplied (Llama's order); or fp32, and it
    is multiplied first (Gemma's order, and that of every LayerNorm in transformers). bias: [D], of the dtype of
    ``weight``, added after that; None: nothing is added. centred: whether the mean of a row is subtracted first
    (LayerNorm); False: the row is divided by its root mean square as it is (RMSNorm).
    """

    weight: Tensor
    eps: float
    bias: Tensor | None = None
    centred: bool = False


class Rotation(NamedTuple):
    """The angles of each row of a pass, by its position.

    cos, signed_sin: [R, 1, D] as :func:`foresay.verifier.ops.attention.rotate` takes them. query_factor: [R], of the
    same dtype, the factor of a row's queries after rotation; None: none.
    """

    cos: Tensor
    signed_sin: Tensor
    query_factor: Tensor | None = None


@dataclass(frozen=True, slots=True)
class QKNorms:
    """The norms of a layer's queries and keys.

    query, key: weights, [D] each; if ``whole`` [Q * D] and [G * D]: all heads of a row are normalised together. after:
    heads are normalised after rotation, not before. values: values are normalised too, each head, without weight.
    """

    query: Tensor
    key: Tensor
    eps: float
    whole: bool = False
    after: bool = False
    values: bool = False

    def __post_init__(self) -> None:
        assert not (self.whole and self.after), "no model norms all heads as one after the rotation"
        assert not (self.values and (self.whole or self.after)), "values are normalised like queries and keys"


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The positions of a pass's rows, the slots of their keys, and the units of work.

    positions, row_slots: int64[R], the position and the slot of each row; padding's are 0. slots: int32[S, N], of all
    positions of the texts. info, int32[R, 3]: a row's sequence, how many leading positions of that it attends to, nodes
    of its path. paths: int32[R, 64], the slots of those. work_items, int32[.., 7]: first row, rows, first span, the
    span after the last; spans of these rows, in all; the index of their parts, if they are several units, else -1; how
    many groups of rows come before. num_items: int64[1], how many units there are.
    """

    positions: Tensor
    row_slots: Tensor
    slots: Tensor
    info: Tensor
    paths: Tensor
    work_items: Tensor
    num_items: Tensor


@dataclass(slots=True)
class AttentionMetadata:
    """The positions of rows and slots of their keys. All tensors are on one device; no shape depends on their content.

    tables: int32[S, P], page ids; entries no row reaches may hold anything. page_size: slots of a page.
    lengths: int32[S], committed tokens: their keys are in slots 0 .. length - 1 of the sequence.
    offsets: int32[S + 1]: rows offsets[s] .. offsets[s + 1] - 1 are those of sequence s, later rows are padding.
    words: int64[R], ancestor words (bit i: node i, kept in slot length + i, is the row or above it); or None: the rows
        are consecutive ones of a text, kept in slots length, length + 1 and so on.
    depths: int32[R], nodes above each row, which is at position length + depth. Not read where words is None.
    is_prefill: int32[S], 1 for sequences whose rows are those of a text though there are words, for kernels of a CPU;
        None: no sequence's. sequences: int64[1], how many there are, read when it runs (of compiled kernels; None: S).
    plan: the result of :func:`foresay.verifier.ops.attention.plan_attention`; None: it was not called. tails: that of
        :func:`foresay.verifier.ops.attention.tail_slots`. fuse_rope: whether attention may rotate its rows, which are
        whole trees: node 0, 1, .. of each, so that no key of a path is stored yet.
    """

    tables: Tensor
    page_size: int
    lengths: Tensor
    offsets: Tensor
    words: Tensor | None = None
    depths: Tensor | None = None
    is_prefill: Tensor | None = None
    sequences: Tensor | None = None
    plan: AttentionPlan | None = None
    tails: Tensor | None = None
    fuse_rope: bool = False


class FusedRope(NamedTuple):
    """Queries that attention rotates, and keys and values that it stores in these slots, as
    :func:`foresay.verifier.ops.attention.rotate_and_store` does."""

    product: Tensor | SplitKSums
    rotation: Rotation
    slots: Tensor


@dataclass(frozen=True, slots=True)
class Routing:
    """How ``top_k`` of the experts are chosen for a row: :class:`foresay.verifier.model.feed_forward.TopKRouter`."""

    experts: int
    top_k: int
    sigmoid: bool = False
    groups: tuple[int, int] = (1, 1)
    norm_topk: bool = True
    scale: float = 1.0

    def tiles(self, chosen: Tensor) -> tuple[int, int]:
        """The most tiles of a GPU's product with rows of one expert that there can be, and the rows of each. chosen:
        [R, k]."""
        pairs, rows = chosen.numel(), tile_rows(chosen.numel(), self.experts)
        return (pairs + min(self.experts, pairs) * (rows - 1)) // rows, rows


def tile_rows(pairs: int, experts: int) -> int:
    """Rows of a tile: at least as many as an expert has on average, up to 64."""
    return next((rows for rows in (16, 32) if pairs <= rows * experts), 64)


#: The cost of reading a block of an expert's weight, in rows multiplied with it; and the multiple that its rows are
#: padded to, as rows are rounded in such tiles.
READING, TILE = 3, 8
#: Numbers of a table of spans before the first.
SPANS = 3


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """The positions of each expert's rows.

    positions: int32[R, k], of each row for each of its experts, in the order of these. spans: int64[..]: how many
    experts have rows; and of compiled kernels of a CPU, whose positions are consecutive ones of copies: the total cost;
    the position after the last; then for each with rows its number, its first position, the one after its last, and the
    cost of those before it. Else a position is ``row * k + slot``, -1 of padding, and they are in tiles of N.
    sorted_ids: int32[T, N], the positions of a tile, R * k after the last. expert_ids: int32[T], its expert, or -1.
    """

    positions: Tensor
    spans: Tensor
    sorted_ids: Tensor | None = None
    expert_ids: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Scan:
    """The other weights of a Mamba-2 scan, fp32: bias [C] of the convolution; skip [H], the factor of a row's own
    values that each head adds to its output. parts: how many of a row are normalised, each by itself. step: the factor
    of steps, which are multiplied before."""

    bias: Tensor
    skip: Tensor
    parts: int
    step: float = 1.0


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """Of a recurrent layer, fp32: taps [T, C] of the convolution, the current row's last; decay [H], below 0, and its
    shift [H]; norm [D] of each head's output. tiled: the output has the first heads of all keys first, then all second
    ones; False: the heads of each key are adjacent. scan: Mamba-2's; norm is [V] then."""

    taps: Tensor
    decay: Tensor
    shift: Tensor
    norm: Tensor
    eps: float
    tiled: bool = False
    scan: Scan | None = None


@dataclass(frozen=True, slots=True)
class StateRows:
    """Which states the rows of a pass continue from, and where states of texts are saved.

    metadata: the same rows. pages: int32[S, 3], state pages: where each sequence's state is, and those of its two
    stops. stops: int32[S, 2], after how many rows of a text; 0: nowhere. nodes: int32[S], the first of a text's rows
    that are nodes, which write records; all rows of a tree do. count: int64[1], the number of rows, read when it runs
    (of compiled kernels, which need it if there is padding; None: all).
    """

    metadata: AttentionMetadata
    pages: Tensor
    stops: Tensor
    nodes: Tensor
    count: Tensor | None = None


#: The tensors of :class:`RowSampling`.
SAMPLING = {
    "temperature": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "seeds": torch.int64,
    "positions": torch.int64,
}
Numbers = NDArray[Any]
_SIGNED, _MOST_OF_INT32 = 1 << 63, (1 << 31) - 1
#: Below this temperature the sample is greedy, as in spec/sampling.py.
MIN_TEMPERATURE = 1e-30


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How each of N rows is sampled; all tensors [N], on the device of the logits.

    temperature, top_p, min_p: fp32. top_k: int32, 0 or less is off. seeds: int64, the bits of the request's seed.
    positions: int64, the absolute position of the token being sampled.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    positions: Tensor

    @classmethod
    def from_params(
        cls,
        rows: Sequence[SamplingParams],
        seeds: Sequence[int],
        positions: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> RowSampling:
        """One entry per row in each argument; a seed is any integer, taken modulo 2**64."""
        made = cls(*(torch.zeros(len(rows), dtype=dtype) for dtype in SAMPLING.values()))
        columns = made.columns()
        for row, (sampling, seed) in enumerate(zip(rows, seeds, strict=True)):
            columns.write(row, sampling, seed, positions[row])
        return made.to(torch.device(device))

    def row_params(self, n: int) -> SamplingParams:
        """How one row is sampled."""
        temperature, top_p, min_p = (float(each[n]) for each in (self.temperature, self.top_p, self.min_p))
        return SamplingParams(temperature=temperature, top_k=int(self.top_k[n]), top_p=top_p, min_p=min_p)

    def to(self, device: torch.device) -> RowSampling:
        """The same on another device."""
        return RowSampling(*(getattr(self, each.name).to(device) for each in fields(self)))

    def columns(self) -> SamplingColumns:
        """The same memory, for the host to write to; only for CPU tensors."""
        return SamplingColumns(*(getattr(self, each.name).numpy() for each in fields(self)))


class SamplingColumns(NamedTuple):
    """The columns of :class:`RowSampling`."""

    temperature: Numbers
    top_k: Numbers
    top_p: Numbers
    min_p: Numbers
    seeds: Numbers
    positions: Numbers

    def write(self, rows: int | slice, sampling: SamplingParams, seed: int, positions: int | Sequence[int]) -> None:
        """Write how these rows are sampled; a seed is any integer, taken modulo 2**64."""
        self.temperature[rows], self.top_p[rows], self.min_p[rows] = (
            sampling.temperature,
            sampling.top_p,
            sampling.min_p,
        )
        self.top_k[rows] = min(sampling.top_k, _MOST_OF_INT32)
        self.seeds[rows], self.positions[rows] = (seed + _SIGNED) % (2 * _SIGNED) - _SIGNED, positions


#: The most children of one node; also how many of a row's likeliest tokens the filters are searched in.
MOST_CHILDREN = 64


class Above(NamedTuple):
    """The parents of a level: scores fp32[S, F], log chances along their paths; words int64[S, F]; numbers int64[F],
    the same in all trees. Contiguous."""

    scores: Tensor
    words: Tensor
    numbers: Tensor


class Pieces(NamedTuple):
    """Piecewise linear curves, which map a log chance x of the r-th best child to ``slope * x + shift``.

    knots: fp32[32], increasing, infinity after the last. slopes, shifts: fp32[S, groups * pieces], contiguous; a
    child's group is r, or the last one; its piece is how many knots are below x. pieces: of a group. least: lower
    values count as this.
    """

    knots: Tensor
    slopes: Tensor
    shifts: Tensor
    pieces: int
    least: float


class Kept(NamedTuple):
    """[S, W] each. tokens, int64. indices: of the parents among the F nodes. parents: their numbers. scores:
    fp32, minus infinity where no child was left. words: int64."""

    tokens: Tensor
    indices: Tensor
    parents: Tensor
    scores: Tensor
    words: Tensor


#: Fills the entries after a path.
NO_NODE = -1


@dataclass(frozen=True, slots=True)
class AcceptedPaths:
    """The accepted paths of B sequences; int64 throughout.

    lengths: [B], nodes on the path, 1 more than accepted drafts; 0 for a sequence without nodes. paths: [B, N], node
    ids from the root down. emitted: [B, N], the tokens to append, the bonus token last. sources: [B, N], the slots of
    the path's nodes, which are moved down to the first ``lengths`` slots. All padded with ``NO_NODE``.
    """

    lengths: Tensor
    paths: Tensor
    emitted: Tensor
    sources: Tensor

    @classmethod
    def empty(cls, tokens: Tensor) -> AcceptedPaths:
        """Room for the paths of trees whose tokens are [B, N]."""
        return cls(tokens.new_zeros(len(tokens)), *(torch.full_like(tokens, NO_NODE) for _ in range(3)))


class TextEnd(NamedTuple):
    """tokens: int64[S, F]. lengths: int32[S], the position of the first of them. roots: int64[S], the indices of the
    roots among all."""

    tokens: Tensor
    lengths: Tensor
    roots: Tensor
