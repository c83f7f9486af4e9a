"""Layers that keep a state of a text: nodes, as those of :mod:`foresay.verifier.model.layers`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from foresay.verifier.model.products import MIXED, OUTPUT, RATES, NormKind, Product, Vector

#: Of a recurrent layer: the convolution, decays and their shifts, the norm of the heads' output.
TAPS, DECAY, SHIFT, HEAD_NORM = (
    "linear_attn.conv1d.weight", "linear_attn.A_log", "linear_attn.dt_bias", "linear_attn.norm"
)  # fmt: skip
SHORT_TAPS = "conv.conv.weight"
#: The module of Mamba-2 in files.
SCAN = "mamba"
#: In place of a norm where the heads' output has none: with the root of this epsilon as weight it changes nothing, as
#: no mean square is large enough to change the sum.
UNNORMED = NormKind(2.0**80, weighted=False, wide=True)
#: Parameters that files store as the logarithm of their negation.
DECAYS = (DECAY, f"{SCAN}.A_log")


@dataclass(frozen=True, slots=True)
class Remembering:
    """A recurrence whose heads each have a matrix S that associates keys with values.

    Queries, keys and values go through a convolution of ``taps`` rows and SiLU. Each of ``key_heads`` serves the same
    number of adjacent ``value_heads``. norm: of the heads' output.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    norm: NormKind

    @property
    def keys(self) -> int:
        """Width of all keys, and of all queries."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Width of all values."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """The convolution's channels."""
        return 2 * self.keys + self.values

    @property
    def record(self) -> int:
        """Numbers of a node's record: its keys, the updates of its values, and its decays."""
        return self.keys + self.values + self.value_heads


@dataclass(frozen=True, slots=True)
class GatedDelta(Remembering):
    """Gated DeltaNet: for each row, with a key k and a query q of length 1, S is multiplied by the row's decay, then
    k * share * (v - S k) is added; the output is S q. It is normalised, each head by itself, and gated. tiled: in files
    a key serves every ``key_heads``-th head. by_key: the products whose rows files group by key, as one tensor.
    """

    tiled: bool = False
    by_key: tuple[str, ...] = ()

    def products(self, hidden: int) -> tuple[Product, ...]:
        """The products into its heads, their rates, and out of them."""
        mixed, rates = {"qkv": self.channels, "z": self.values}, dict.fromkeys("ba", self.value_heads)
        into = (
            Product(name, {f"linear_attn.in_proj_{kind}": size for kind, size in rows.items()}, hidden)
            for name, parts in ((MIXED, mixed), (RATES, rates))
            for rows in ({"".join(parts): sum(parts.values())} if name in self.by_key else parts,)
        )
        return *into, Product(OUTPUT, {"linear_attn.out_proj": hidden}, self.values)

    def vectors(self) -> Iterator[Vector]:
        """Its other parameters."""
        yield Vector(TAPS, self.channels, wide=True, more=(1, self.taps))
        yield Vector(DECAY, self.value_heads, wide=True)
        yield Vector(SHIFT, self.value_heads, wide=True)
        yield from self.norm.vectors(HEAD_NORM, self.value_dim)


@dataclass(frozen=True, slots=True)
class Mamba2(Remembering):
    """Mamba-2: for each row, with a step t of each head, S is multiplied by e^(decay * t), then k * t * v is
    added; the output is S q + skip * v. It is gated and then normalised, heads of one key together. Files have one
    product: gates, values, keys, queries, steps. biased: whether the convolution has a bias. factors: of queries,
    keys, values and steps of that product.
    """

    biased: bool = True
    factors: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0)

    def products(self, hidden: int) -> tuple[Product, ...]:
        """The products into its heads, and out of them."""
        whole = self.values + self.channels + self.value_heads
        return (
            Product(MIXED, {f"{SCAN}.in_proj": whole}, hidden),
            Product(OUTPUT, {f"{SCAN}.out_proj": hidden}, self.values),
        )

    def vectors(self) -> Iterator[Vector]:
        """Its other parameters."""
        yield Vector(f"{SCAN}.conv1d.weight", self.channels, wide=True, more=(1, self.taps))
        if self.biased:
            yield Vector(f"{SCAN}.conv1d.bias", self.channels, wide=True)
        for name in ("A_log", "dt_bias", "D"):
            yield Vector(f"{SCAN}.{name}", self.value_heads, wide=True)
        yield from self.norm.vectors(f"{SCAN}.norm", self.values)


@dataclass(frozen=True, slots=True)
class ShortConv:
    """A depthwise convolution of ``taps`` rows (LFM2).

    Each row has three parts: the convolution's input is the first times the last, and its output is multiplied by the
    second. The state of a text is the convolution's last input rows; it has no heads.
    """

    channels: int
    taps: int

    value_heads = key_dim = value_dim = record = 0

    def products(self, hidden: int) -> tuple[Product, ...]:
        """The products into its parts, and out of it."""
        into = Product(MIXED, {"conv.in_proj": 3 * self.channels}, hidden)
        return into, Product(OUTPUT, {"conv.out_proj": hidden}, self.channels)

    def vectors(self) -> Iterator[Vector]:
        """Its taps."""
        yield Vector(SHORT_TAPS, self.channels, wide=True, more=(1, self.taps))


#: Layers that keep a state of a text, not keys and values of its tokens.
Recurrence = GatedDelta | Mamba2 | ShortConv
