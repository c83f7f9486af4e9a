"""The part of a layer inside its second residual: an MLP, or a mixture of experts. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from foresay.verifier.model.products import (
    DOWN,
    GATE_UP,
    MODULES,
    SHARED_DOWN,
    SHARED_GATE_UP,
    Product,
    Stacked,
    Vector,
)

#: An MLP's activation; "relu2" has no gates: it is squared ReLU. "clamped" is gpt-oss's: both halves are clamped at 7,
#: and ``(up + 1) * gate * sigmoid(1.702 * gate)``.
Activation = Literal["silu", "gelu", "relu2", "clamped"]
#: The products of an MLP that stands beside experts.
DENSE_MLP = {GATE_UP: SHARED_GATE_UP, DOWN: SHARED_DOWN}
#: Modules of experts, as most checkpoints name them.
EXPERT_MODULES = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj")


@dataclass(frozen=True, slots=True)
class MLP:
    """``down(activation(gate(x)) * up(x))``, or, if the activation has no gates, ``down(activation(up(x)))``. fused:
    the name of gate and up in files if they are one tensor there."""

    inner: int
    activation: Activation = "silu"
    bias: bool = False
    fused: str | None = None

    @property
    def width(self) -> int:
        """The inner width that a row passes through."""
        return self.inner

    def products(self, hidden: int) -> tuple[Product, Product]:
        """The products into its inner width, and back."""
        modules = MODULES[GATE_UP][self.activation == "relu2" :]
        into = dict.fromkeys(modules, self.inner) if self.fused is None else {self.fused: 2 * self.inner}
        return (
            Product(GATE_UP, into, hidden, self.bias),
            Product(DOWN, {MODULES[DOWN][0]: hidden}, self.inner, self.bias),
        )


#: Tensors of all experts in newer checkpoints; and in GGUF files, which have gates apart, and perhaps biases.
GGUF_STACKS = {
    name: tuple(
        each
        for turn, module in enumerate(modules)
        for each in (
            Stacked(f"mlp.experts.{module}.weight", (turn,)),
            Stacked(f"mlp.experts.{module}.bias", (turn,), holds="bias"),
        )
    )
    for name, modules in ((GATE_UP, ("gate_proj", "up_proj")), (DOWN, ("down_proj",)))
}
STACKS = {
    GATE_UP: (Stacked("mlp.experts.gate_up_proj", (0, 1)), *GGUF_STACKS[GATE_UP]),
    DOWN: (Stacked("mlp.experts.down_proj"), *GGUF_STACKS[DOWN]),
}


@dataclass(frozen=True, slots=True)
class TopKRouter:
    """How experts are chosen for a row, and weighted.

    module: its weight gives a logit for each expert, and, with ``bias``, its bias is added. sigmoid: scores are the
    sigmoid of each logit, else the softmax of all. correction: a vector that is added to scores only for the choice.
    groups: the number of groups of experts, and how many of them are considered: those with the largest sum of their
    two best sigmoids, or largest softmax. norm_topk: the weights of the chosen are divided by their sum; scale: and
    multiplied; factors: and each by the number of its expert in this vector. scaled: a vector that multiplies the
    router's input, after a norm without a weight and divided by the root of the width; None: it reads what the experts
    read.
    Of equal scores the lowest number is chosen.
    """

    module: str = "mlp.gate"
    bias: bool = False
    sigmoid: bool = False
    correction: str | None = None
    groups: tuple[int, int] = (1, 1)
    norm_topk: bool = True
    scale: float = 1.0
    factors: str | None = None
    scaled: str | None = None


@dataclass(frozen=True, slots=True)
class Experts:
    """``count`` MLPs, of which each row uses ``top_k``; their outputs are weighted and added up.

    inner: width of each. modules: the names of gate, up and down in files, with an expert's number in the braces.
    stacked: what files may have instead, for GATE_UP and DOWN. shared: an MLP that all rows use; shared_gate: a module
    whose sigmoid multiplies its output.
    """

    count: int
    top_k: int
    inner: int
    router: TopKRouter = TopKRouter()
    activation: Activation = "silu"
    bias: bool = False
    modules: tuple[str, str, str] = EXPERT_MODULES
    stacked: Mapping[str, tuple[Stacked, ...]] = field(default_factory=lambda: STACKS, hash=False)
    shared: MLP | None = None
    shared_module: str = "mlp.shared_expert"
    shared_gate: str | None = None

    @property
    def width(self) -> int:
        """The total inner width that a row passes through."""
        return self.top_k * self.inner + (0 if self.shared is None else self.shared.inner)

    def products(self, hidden: int) -> tuple[Product, ...]:
        """The products of all experts, and of the shared one: all gates, then all up matrices."""
        gate, up, down = self.modules
        turns = (up,) if self.activation == "relu2" else (gate, up)
        into = {one.format(number): self.inner for one in turns for number in range(self.count)}
        back = dict.fromkeys(map(down.format, range(self.count)), hidden)
        of = self.bias, self.count, self.top_k
        return (
            Product(GATE_UP, into, hidden, *of, self.stacked[GATE_UP]),
            Product(DOWN, back, self.inner, *of, self.stacked[DOWN]),
            *self._of_shared(hidden),
        )

    def _of_shared(self, hidden: int) -> Iterator[Product]:
        if self.shared is not None:
            for one in self.shared.products(hidden):
                rows = {name.replace("mlp", self.shared_module, 1): size for name, size in one.rows.items()}
                yield replace(one, name=DENSE_MLP[one.name], rows=rows)

    def vectors(self, hidden: int) -> Iterator[Vector]:
        """The router's vectors, in fp32, and the shared expert's gate."""
        yield Vector(f"{self.router.module}.weight", self.count, wide=True, more=(hidden,))
        if self.router.bias:
            yield Vector(f"{self.router.module}.bias", self.count, wide=True)
        for name, size in ((self.router.correction, self.count), (self.router.factors, self.count)):
            if name is not None:
                yield Vector(name, size, wide=True)
        if self.router.scaled is not None:
            yield Vector(self.router.scaled, hidden, wide=True)
        if self.shared_gate is not None:
            yield Vector(f"{self.shared_gate}.weight", 1, wide=True, more=(hidden,))
