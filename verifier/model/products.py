"""What nodes are described by: the products, vectors and norms of a layer, with their names in files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

#: Products of a layer: queries, keys and values; gates of heads; the output of attention; gate and up of the MLP; down.
QKV, HEAD_GATE, OUTPUT, GATE_UP, DOWN = "qkv", "head_gate", "output", "gate_up", "down"
#: Of a recurrent layer: queries, keys, values and output gates; the learning rates and decays of heads.
MIXED, RATES = "mixed", "rates"
#: Before the names of products of a recurrence that has the same input as attention.
RECURRENT = "beside_"
#: Of a mixture layer, whose experts are GATE_UP and DOWN: the shared MLP that all rows use.
SHARED_GATE_UP, SHARED_DOWN = "shared_gate_up", "shared_down"
#: The modules stacked in each product, as Llama's checkpoints name them.
MODULES = {
    QKV: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    HEAD_GATE: ("self_attn.gate_proj",),
    OUTPUT: ("self_attn.o_proj",),
    GATE_UP: ("mlp.gate_proj", "mlp.up_proj"),
    DOWN: ("mlp.down_proj",),
}


@dataclass(frozen=True, slots=True)
class Stacked:
    """A tensor in files that holds a product of all experts, [E, O, K], or their biases, [E, O]; or, for MXFP4, its
    codes, [E, O, K / 32, 16], or its scales, [E, O, K / 32].

    name: of the tensor. turns: which of the product's parts (gate, up) it has. transposed: it is [E, K, O].
    interleaved: rows of the turns alternate. holds: which of these it is. among: the tensor is [E * N, K],
    and the product has of each expert's N rows those from the first number to before the second; the third is N.
    """

    name: str
    turns: tuple[int, ...] = (0,)
    transposed: bool = False
    interleaved: bool = False
    holds: Literal["weight", "bias", "blocks", "scales"] = "weight"
    among: tuple[int, int, int] | None = None


@dataclass(frozen=True, slots=True)
class Product:
    """A fused product of a layer. name: see above. rows: of each of its modules in files, in stacking order. inner:
    width of its input. bias: whether each module has one. experts: how many experts have one each, of which a row uses
    ``top_k``; 0: there is one for all rows. stacked: what files may have instead of the modules' tensors.
    """

    name: str
    rows: Mapping[str, int]
    inner: int
    bias: bool = False
    experts: int = 0
    top_k: int = 0
    stacked: tuple[Stacked, ...] = ()

    @property
    def outer(self) -> int:
        """Width of its output."""
        return sum(self.rows.values())


@dataclass(frozen=True, slots=True)
class Vector:
    """A one-dimensional parameter. wide: kept in fp32, whatever the compute dtype. less_one: files store it minus one
    (GGUF's do not). more: further dimensions."""

    name: str
    size: int
    wide: bool = False
    less_one: bool = False
    more: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """All its dimensions."""
        return self.size, *self.more


@dataclass(frozen=True, slots=True)
class NormKind:
    """How vectors are normalised: RMS norm, or, ``centred``, LayerNorm.

    weighted: whether there is a weight, and bias: a bias. wide: they are applied in fp32, before the result is rounded.
    less_one: files store weights minus one.
    """

    eps: float = 1e-6
    centred: bool = False
    weighted: bool = True
    bias: bool = False
    wide: bool = False
    less_one: bool = False

    def vectors(self, module: str, size: int) -> Iterator[Vector]:
        """Its parameters, for a module of that name and vectors of that size."""
        if self.weighted:
            yield Vector(f"{module}.weight", size, self.wide, self.less_one)
        if self.bias:
            yield Vector(f"{module}.bias", size, self.wide)
