"""One table of cases of the ops on rows, for every executor: compiled kernels of a CPU, those of a GPU, references."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from foresay.verifier.ops.attention import join_latents, rotate_and_store, rotate_queries
from foresay.verifier.ops.records import Norm, QKNorms, Rotation, SplitKSums
from foresay.verifier.ops.rows import (
    add_norm,
    embed,
    finish_logits,
    gate_heads,
    gate_inputs,
    layer_inputs,
    norm,
    pair,
    take_both,
)

#: An op as an executor has it: itself, or what launches its kernel.
At = Callable[[Any], Callable[..., Any]]
#: What has a row for each, by name. A product may be :class:`SplitKSums`.
Rows = Mapping[str, Any]


class Noise:
    """Normal numbers on a device: of one shape always the same, if it is the first of that shape."""

    def __init__(self, device: torch.device, dtype: torch.dtype, rows: int) -> None:
        self.device, self.dtype, self.rows = device, dtype, rows
        self._seen: dict[tuple[int, ...], int] = {}

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        again = self._seen[shape] = self._seen.get(shape, -1) + 1
        generator = torch.Generator().manual_seed(sum(shape) + 1000 * again)
        return torch.randn(shape, generator=generator).to(self.device, dtype or self.dtype)

    def integers(self, most: int) -> Tensor:
        """One for each row, all of them different if there are as many."""
        mixed = torch.randperm(most, generator=torch.Generator().manual_seed(most))
        return mixed.repeat(-(-self.rows // most))[: self.rows].to(self.device)


@dataclass(frozen=True)
class Case:
    """rows: of the op. run: the op on some of them, and what it wrote. wanted: that in exact arithmetic; None: as the
    reference says. ulps: roundings of the dtype between them; launched: on a GPU, if they are not twice as many.
    exact: outputs in which references have the same bits. product: which of the rows may be sums of segments. equal:
    pairs that have the same bits wherever they are made."""

    rows: Rows
    run: Callable[[At, Rows], Sequence[Tensor]]
    wanted: Sequence[Tensor] | None = None
    ulps: float = 2.0
    exact: Sequence[int] = ()
    product: str = ""
    equal: Callable[[At, Sequence[Tensor]], Iterator[tuple[Tensor, Tensor]]] = lambda at, found: iter(())
    launched: float = 0.0

    def of(self, part: slice) -> dict[str, Any]:
        """Copies of some rows."""
        return {name: each[part].clone() for name, each in self.rows.items()}


Make = Callable[[Noise], Case]


def close(found: Tensor, wanted: Tensor, ulps: float, dtype: torch.dtype) -> bool:
    """Within so many roundings, relative and absolute; a sum's order may move one."""
    near = ulps * torch.finfo(dtype).eps + 1e-6
    return torch.allclose(found.cpu().double(), wanted.cpu().double(), rtol=near, atol=near, equal_nan=True)


def parted(product: Tensor, noise: Noise) -> SplitKSums:
    """Segments whose sum is about this product; it is what they finish to that is compared."""
    parts = noise(2, *product.shape, dtype=torch.float32)
    sums = torch.stack((parts[0], parts[1], product.float() - parts[0] - parts[1]))
    return SplitKSums(sums, noise(product.shape[1]))


# -- norms -------------------------------------------------------------------------------------------------------------

#: Whether a bias is added, whether the mean is subtracted, whether weights are of fp32.
WAYS = {
    "rms": (False, False, False),
    "rms, wide": (False, False, True),
    "biased": (True, False, False),
    "centred": (False, True, False),
    "layer": (True, True, False),
    "layer, wide": (True, True, True),
}


def way(noise: Noise, width: int, kind: str) -> Norm:
    biased, centred, wide = WAYS[kind]
    dtype = torch.float32 if wide else noise.dtype
    return Norm(noise(width, dtype=dtype), 1e-5, noise(1, width, dtype=dtype)[0] if biased else None, centred)


def in_torch_s_words(x: Tensor, how: Norm) -> Tensor:
    """What torch's own function gives, in fp64."""
    shape, weight = x.shape[-1:], how.weight.double()
    bias = None if how.bias is None else how.bias.double()
    if how.centred:
        return functional.layer_norm(x.double(), shape, weight, bias, how.eps)
    normed = functional.rms_norm(x.double(), shape, weight, how.eps)
    return normed if bias is None else normed + bias


def norms(width: int, kind: str) -> Make:
    def made(noise: Noise) -> Case:
        x, how = noise(noise.rows, width) + (3.0 if WAYS[kind][1] else 0.0), way(noise, width, kind)
        # One rounding, or another of a number of up to 4 before it is multiplied; more of a sum's in fp32.
        ulps = 40.0 if noise.dtype is torch.float32 else 1.0 if WAYS[kind][2] else 9.0
        return Case({"x": x}, lambda at, rows: [at(norm)(rows["x"], how)], [in_torch_s_words(x, how)], ulps)

    return made


def added(width: int, kind: str, share: float = 1.0, scalar: float | None = None) -> Make:
    """A branch is added to the stream, rounded; the stream is scaled, rounded; and it is normed, if it is."""

    def made(noise: Noise) -> Case:
        x, y = noise(noise.rows, width), noise(noise.rows, width)
        how = way(noise, width, kind) if kind else None
        by = None if scalar is None else torch.tensor([scalar]).to(x.device, x.dtype)

        def run(at: At, rows: Rows) -> Sequence[Tensor]:
            normed = at(add_norm)(rows["x"], rows["y"], how, share=share, **({} if by is None else {"scalar": by}))
            assert (normed is rows["x"]) == (how is None)
            return [rows["x"], normed]

        def equal(at: At, found: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
            yield found[1], found[0] if how is None else at(norm)(found[0], how)

        stream = x + share * y if by is None else (x + share * y) * by
        wanted = [stream, stream if how is None else in_torch_s_words(stream, how)]
        return Case({"x": x, "y": y}, run, wanted, 12.0, [0], "y", equal)

    return made


# -- gates and embeddings ----------------------------------------------------------------------------------------------


def read_by_layers(layers: int, width: int, stored: torch.dtype | None = None) -> Make:
    """In the words of transformers; the table's numbers are rounded to what is computed in."""

    def made(noise: Noise) -> Case:
        product, dtype = noise(noise.rows, layers * width), noise.dtype
        table, tokens = noise(50, layers * width, dtype=stored or dtype), noise.integers(50)
        how = Norm(1 + 0.3 * noise(width, dtype=torch.float32), 1e-6)
        factors = 64**-0.5, float(torch.tensor(width**0.5).to(dtype))
        scaled = (product * factors[0]).view(-1, layers, width).float()
        normed = scaled * torch.pow(scaled.pow(2).mean(-1, keepdim=True) + 1e-6, -0.5) * how.weight
        read = functional.embedding(tokens, table.to(dtype)) * torch.tensor(width**0.5).to(dtype)
        wanted = (normed.to(dtype) + read.view(-1, layers, width)) * 2.0**-0.5
        return Case(
            {"product": product, "tokens": tokens},
            lambda at, rows: [at(layer_inputs)(rows["product"], dtype, table, rows["tokens"], how, factors)],
            [wanted.flatten(1)],
            4.0,
            product="product",
        )

    return made


def gated_inputs(layers: int, width: int, number: int) -> Make:
    def made(noise: Noise) -> Case:
        gate, inputs = noise(noise.rows, width), noise(noise.rows, layers * width)
        wanted = functional.gelu(gate, approximate="tanh") * inputs.view(-1, layers, width)[:, number]
        return Case(
            {"gate": gate, "inputs": inputs},
            lambda at, rows: [at(gate_inputs)(rows["gate"], rows["inputs"], number)],
            [wanted],
            16.0,  # that form of GELU, x * (1 + tanh(y)) / 2, loses digits where tanh(y) is close to -1
            product="gate",
        )

    return made


def gated_heads(width: int) -> Make:
    """Times the sigmoid of a product; far gates are open or shut."""

    def made(noise: Noise) -> Case:
        x, gate = noise(noise.rows, width), 4 * noise(noise.rows, width)
        gate[0, 0], gate[1, 0], gate[2, 0] = 200.0, -200.0, torch.nan

        def run(at: At, rows: Rows) -> Sequence[Tensor]:
            at(gate_heads)(rows["x"], rows["gate"])
            return [rows["x"]]

        return Case({"x": x, "gate": gate}, run, [x.double() * gate.double().sigmoid()], 3.0, product="gate")

    return made


def finished(scale: float, cap: float | None, width: int) -> Make:
    def made(noise: Noise) -> Case:
        x = noise(noise.rows, width, dtype=torch.float32)
        wanted = x.double() * scale

        def run(at: At, rows: Rows) -> Sequence[Tensor]:
            at(finish_logits)(rows["x"], scale, cap)
            return [rows["x"]]

        return Case({"x": x}, run, [wanted if cap is None else cap * (wanted / cap).tanh()], launched=8 * (cap or 0.0))

    return made


def begun(width: int, kind: str) -> Make:
    """What a pass begins with: an embedding, normed or not; cosines and sines of rows."""

    def made(noise: Noise) -> Case:
        table, how = noise(9, width), way(noise, width, kind) if kind else None

        def run(at: At, rows: Rows) -> Sequence[Tensor]:
            return [*at(embed)(table, rows["tokens"], how), *at(take_both)(table, -table, rows["tokens"])]

        def equal(at: At, found: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
            yield found[1], found[0] if how is None else at(norm)(found[0], how)

        tokens = noise.integers(9)
        x = table[tokens]
        wanted = [x, x if how is None else in_torch_s_words(x, how), x, -x]
        return Case({"tokens": tokens}, run, wanted, 9.0, [0, 2, 3], equal=equal)

    return made


def paired(width: int, keep_normed: bool) -> Make:
    """A token's embedding beside a hidden state, each normed; ids that are none are those at the ends."""

    def made(noise: Noise) -> Case:
        table, weights = noise(9, width), (noise(width), noise(1, width)[0])
        tokens, hidden = noise.integers(11) - 1, noise(noise.rows, width)

        def equal(at: At, found: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
            of_hidden = at(norm)(hidden[: len(found[0])].clone(), Norm(weights[1], 1e-5))
            of_tokens = at(norm)(table[tokens.clamp(0, 8)][: len(found[0])], Norm(weights[0], 1e-5))
            yield found[0], torch.cat((of_tokens, of_hidden), dim=1)
            yield found[1], of_hidden if keep_normed else hidden[: len(found[0])]

        return Case(
            {"tokens": tokens, "hidden": hidden},
            lambda at, rows: at(pair)(table, rows["tokens"], rows["hidden"], weights, 1e-5, keep_normed),
            ulps=9.0,
            equal=equal,
        )

    return made


# -- rotation ----------------------------------------------------------------------------------------------------------


def norms_of(noise: Noise, kind: str, heads: tuple[int, int, int], values: bool = False) -> QKNorms | None:
    """kind: how heads are normed; "": they are not."""
    (queries, groups, dim), whole = heads, kind.startswith("whole")
    dtype = torch.float32 if kind.endswith("wide") else noise.dtype
    query, key = noise(queries * dim if whole else dim, dtype=dtype), noise(1, groups * dim, dtype=dtype)[0]
    key = key if whole else key[:dim].clone()
    return QKNorms(query, key, 1e-5, whole, kind.startswith("after"), values=values) if kind else None


def rotated(heads: tuple[int, int, int], kind: str, factor: bool = False, valued: str = "") -> Make:
    """Queries; and keys and values in their slots, where nothing else is written. valued: values are normed too;
    "alike": they are the product of keys."""

    def made(noise: Noise) -> Case:
        (queries, groups, dim), rows, alike = heads, noise.rows, valued == "alike"
        qkv = noise(rows, (queries + (1 if alike else 2) * groups) * dim)
        angle = noise(rows, 1, dim // 2, dtype=torch.float32)
        cos, sin = torch.cat((angle, angle), dim=-1).cos(), torch.cat((-angle, angle), dim=-1).sin()
        norms = norms_of(noise, kind, heads, bool(valued))
        given = {"qkv": qkv, "cos": cos.to(qkv.dtype), "sin": sin.to(qkv.dtype), "slots": noise.integers(2 * rows)}
        given |= {"factor": (1 + noise(rows, dtype=torch.float32).abs()).to(qkv.dtype)} if factor else {}

        def run(at: At, rows: Rows) -> Sequence[Tensor]:
            store = torch.full((2, 2 * noise.rows, groups, dim), 7.0).to(qkv)
            turn, slots = Rotation(rows["cos"], rows["sin"], rows.get("factor")), rows["slots"]
            query = at(rotate_and_store)(rows["qkv"], turn, (store[0], store[1], None), slots, norms, None, alike)
            others = [slot for slot in range(2 * noise.rows) if slot not in slots.tolist()]
            assert (store[:, others] == 7.0).all(), "nothing else is written"
            found = [query, store[0][slots], store[1][slots]]
            if valued and isinstance(rows["qkv"], Tensor):
                alone = at(rotate_queries)(rows["qkv"][:, : queries * dim].contiguous(), turn, norms)
                assert torch.equal(alone, query), "of rows that have only queries these are the same"
            return found

        loose = (16.0 if kind else 6.0) * (2 if factor else 1)
        return Case(given, run, None, loose, () if valued else [2], "qkv")

    return made


def joined(heads: int) -> Make:
    """Parts of latents: of one head into slots, and of several in the order of rows."""

    def made(noise: Noise) -> Case:
        plain, turning = noise(noise.rows, heads * 40), noise(noise.rows, heads * 16)
        cos, sin = noise(noise.rows, 1, 16), noise(noise.rows, 1, 16)

        def run(at: At, rows: Rows) -> Sequence[Tensor]:
            slots = rows["slots"] if heads == 1 else None
            out = torch.zeros(2 * noise.rows if heads == 1 else len(rows["plain"]), heads, 56).to(plain)
            at(join_latents)(rows["plain"], rows["turning"], Rotation(rows["cos"], rows["sin"]), out, slots)
            return [out if slots is None else out[slots]]

        slots = noise.integers(2 * noise.rows)
        given = {"plain": plain, "turning": turning, "cos": cos, "sin": sin, "slots": slots}
        return Case(given, run)

    return made


KINDS = ["", "each", "each, wide", "whole", "whole, wide", "after", "after, wide"]
HEADS = [(4, 2, 64), (9, 3, 16), (3, 1, 24), (8, 8, 128)]
VALUED = [(4, 2, 64), (8, 1, 512), (3, 1, 24)]
READ = [(3, 16), (2, 24), (5, 256)]
#: By name; every op on rows, at widths of whole vectors and others.
CASES: dict[str, Make] = {
    **{f"norm, {kind}, {width}": norms(width, kind) for kind in WAYS for width in (16, 100, 576, 1000)},
    "norm, rms, 4096": norms(4096, "rms"),
    "norm, layer, 4096": norms(4096, "layer, wide"),
    **{f"added, {kind or 'plain'}, {n}": added(n, kind) for kind in ("", "rms", "layer") for n in (96, 1000)},
    "a share is added": added(100, "", 0.22),
    "a share is added and normed": added(1000, "layer, wide", 0.22),
    "scaled": added(100, "", 1.0, 0.3),
    "scaled and normed": added(96, "layer", 0.22, 0.3),
    **{f"read by {layers} layers of {width}": read_by_layers(layers, width) for layers, width in READ},
    "read by layers from bf16": read_by_layers(3, 16, torch.bfloat16),
    "read by layers from fp32": read_by_layers(2, 24, torch.float32),
    **{f"gated inputs, {n} of 3": gated_inputs(3, width, n) for n, width in ((0, 16), (1, 24), (2, 256))},
    **{f"gated heads, {width}": gated_heads(width) for width in (7, 256, 1500)},
    "logits scaled": finished(0.25, None, 7),
    "logits capped": finished(1.0, 30.0, 1500),
    "logits scaled and capped": finished(6.0, 5.0, 5003),
    **{f"begun, {kind or 'plain'}": begun(96, kind) for kind in ("", "rms", "layer, wide")},
    "paired": paired(64, False),
    "paired, kept normed": paired(1600, True),
    **{f"rotated, {kind or 'plain'}, {heads}": rotated(heads, kind) for kind in KINDS for heads in HEADS[1:3]},
    **{f"rotated, {kind}, {heads}": rotated(heads, kind) for kind in KINDS[1:3] for heads in HEADS[::3]},
    **{f"rotated, {kind or 'plain'}, factor": rotated((9, 3, 16), kind, True) for kind in KINDS[::2]},
    **{f"values normed, {heads}": rotated(heads, "each, wide", valued="apart") for heads in VALUED},
    **{f"values that are keys, {heads}": rotated(heads, "each, wide", valued="alike") for heads in VALUED},
    "latents of one head": joined(1),
    "latents of three heads": joined(3),
}  # fmt: skip
