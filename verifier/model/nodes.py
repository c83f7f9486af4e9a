"""The parts of a decoder: nodes that describe their parameters and computation. Imports no torch.

::

    Stack   embedding x scale ── Layer ── Layer ── ... ── norm ── head x scale, capped
    Layer   x += share * after(mixer(before(x)))           attention, a recurrence, or both; norms before or after
            x += share * after(mlp(before(x)))             an MLP or experts; parallel: both read the same before(x)

Everything that depends on a model's shape (loading, checking, sizes, quantising, writing, GGUF, the forward pass) reads
these records; a family (:mod:`foresay.verifier.model.families`) makes them from a config.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from foresay.verifier.model.products import (
    DOWN,
    GATE_UP,
    HEAD_GATE,
    MODULES,
    OUTPUT,
    QKV,
    RECURRENT,
    SHARED_DOWN,
    SHARED_GATE_UP,
    NormKind,
    Product,
    Stacked,
    Vector,
)
from foresay.verifier.model.recurrences import Mamba2, Recurrence
from foresay.verifier.model.rope_config import QueryScaling, RopeConfig

#: An MLP's activation; "relu2" has no gates: it is squared ReLU. "clamped" is gpt-oss's: both halves are clamped at 7,
#: and ``(up + 1) * gate * sigmoid(1.702 * gate)``.
Activation = Literal["silu", "gelu", "relu2", "clamped"]


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """Norms of queries and of keys. whole: over all heads of a row together, instead of each head. after: applied after
    rotation. names: of the two modules."""

    kind: NormKind
    whole: bool = False
    after: bool = False
    names: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention.

    scale: the factor of products of queries and keys. rope: their rotary embedding; None: none.
    window: a key is visible iff position(query) - position(key) < window; None: all before are. biases: of QKV and
    OUTPUT, those that have one. softcap: scores s become ``softcap * tanh(s / softcap)``. sinks: each query head has a
    logit that takes part in the softmax and has no value. gated: the heads' output is multiplied by the sigmoid of a
    product of attention's input. interleaved: the rows of that product are in the module of queries, each head's after
    its queries. fused: the name of queries, keys and values in files if they are one tensor there. values_from_keys:
    values are the product of keys, before their norm and rotation. value_norm: of each head's value, without weight.
    source: the number of the earlier layer whose keys and values it reads instead of having its own; None: none.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: RopeConfig | None
    window: int | None = None
    biases: tuple[str, ...] = ()
    norm: HeadNorm | None = None
    softcap: float | None = None
    sinks: bool = False
    gated: bool = False
    query_scaling: QueryScaling | None = None
    fused: str | None = None
    interleaved: bool = False
    values_from_keys: bool = False
    value_norm: NormKind | None = None
    source: int | None = None

    def __post_init__(self) -> None:
        if self.value_norm is not None:
            assert self.norm is not None, "values are normalised next to queries and keys"
            assert self.norm.kind.eps == self.value_norm.eps, "with one epsilon"
            assert not self.value_norm.weighted, "and without weight"

    @property
    def turning(self) -> int:
        """How many numbers of a head the rotary table is for."""
        return self.head_dim

    @property
    def kept_value(self) -> int:
        """How many numbers of a head's value are kept besides the key."""
        return self.head_dim

    @property
    def parts(self) -> int:
        """How many of queries, keys and values are computed."""
        return 1 if self.source is not None else 2 if self.values_from_keys else 3

    @property
    def idle(self) -> tuple[str, ...]:
        """Modules that files may have although nothing reads them: keys and values of layers that use another's."""
        return () if self.source is None else IDLE

    def products(self, hidden: int) -> tuple[Product, ...]:
        """The products into its heads, their gates, and out of them."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        into = dict(zip(MODULES[QKV][: self.parts], (queries * (1 + self.interleaved), keys, keys), strict=False))
        into = into if self.fused is None else {self.fused: sum(into.values())}
        apart = self.gated and not self.interleaved
        gates = (Product(HEAD_GATE, {MODULES[HEAD_GATE][0]: queries}, hidden),) if apart else ()
        return (
            Product(QKV, into, hidden, QKV in self.biases),
            *gates,
            Product(OUTPUT, {MODULES[OUTPUT][0]: hidden}, queries, OUTPUT in self.biases),
        )

    def vectors(self) -> Iterator[Vector]:
        """Its other parameters."""
        if self.norm is not None:
            whole = (self.heads, self.kv_heads) if self.norm.whole else (1, 1)
            for name, heads in list(zip(self.norm.names, whole, strict=True))[: self.parts]:
                yield from self.norm.kind.vectors(name, heads * self.head_dim)
        if self.sinks:
            yield Vector(SINKS, self.heads, wide=True)


SINKS = "self_attn.sinks"
#: Modules without use in layers that read another layer's keys and values.
IDLE = ("self_attn.k_proj", "self_attn.v_proj", "self_attn.k_norm", "self_attn.v_norm")
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
class Router:
    """How experts are chosen for a row, and weighted.

    module: its weight gives a logit for each expert, and, with ``bias``, its bias is added. sigmoid: scores are the
    sigmoid of each logit, else the softmax of all. correction: a vector that is added to scores only for the choice.
    groups: the number of groups of experts, and how many of them are considered: those with the largest sum of their
    two best sigmoids, or largest softmax. normalised: the weights of the chosen are divided by their sum; scale: and
    multiplied.
    Of equal scores the lowest number is chosen.
    """

    module: str = "mlp.gate"
    bias: bool = False
    sigmoid: bool = False
    correction: str | None = None
    groups: tuple[int, int] = (1, 1)
    normalised: bool = True
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Experts:
    """``count`` MLPs, of which each row uses ``chosen``; their outputs are weighted and added up.

    inner: width of each. modules: the names of gate, up and down in files, with an expert's number in the braces.
    stacked: what files may have instead, for GATE_UP and DOWN. shared: an MLP that all rows use; shared_gate: a module
    whose sigmoid multiplies its output.
    """

    count: int
    chosen: int
    inner: int
    router: Router = Router()
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
        return self.chosen * self.inner + (0 if self.shared is None else self.shared.inner)

    def products(self, hidden: int) -> tuple[Product, ...]:
        """The products of all experts, and of the shared one: all gates, then all up matrices."""
        gate, up, down = self.modules
        turns = (up,) if self.activation == "relu2" else (gate, up)
        into = {one.format(number): self.inner for one in turns for number in range(self.count)}
        back = dict.fromkeys(map(down.format, range(self.count)), hidden)
        of = self.bias, self.count, self.chosen
        return (
            Product(GATE_UP, into, hidden, *of, self.stacked[GATE_UP]),
            Product(DOWN, back, self.inner, *of, self.stacked[DOWN]),
            *self._of_shared(hidden),
        )

    def _of_shared(self, hidden: int) -> Iterator[Product]:
        if self.shared is not None:
            names = {GATE_UP: SHARED_GATE_UP, DOWN: SHARED_DOWN}
            for one in self.shared.products(hidden):
                rows = {name.replace("mlp", self.shared_module, 1): size for name, size in one.rows.items()}
                yield replace(one, name=names[one.name], rows=rows)

    def vectors(self, hidden: int) -> Iterator[Vector]:
        """The router's vectors, in fp32, and the shared expert's gate."""
        yield Vector(f"{self.router.module}.weight", self.count, wide=True, more=(hidden,))
        if self.router.bias:
            yield Vector(f"{self.router.module}.bias", self.count, wide=True)
        if self.router.correction is not None:
            yield Vector(self.router.correction, self.count, wide=True)
        if self.shared_gate is not None:
            yield Vector(f"{self.shared_gate}.weight", 1, wide=True, more=(hidden,))


Mixer = Attention | Recurrence | MLP | Experts


@dataclass(frozen=True, slots=True)
class Norms:
    """A layer's norms, by the names of their modules: of the inputs of attention and MLP, and of their outputs."""

    before_attention: str | None = None
    after_attention: str | None = None
    before_mlp: str | None = None
    after_mlp: str | None = None

    def __iter__(self) -> Iterator[str | None]:
        yield from (self.before_attention, self.after_attention, self.before_mlp, self.after_mlp)


#: Llama's; Gemma's, before and after; and OLMo 2's, only after.
BEFORE = Norms("input_layernorm", None, "post_attention_layernorm")
SANDWICH = Norms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
AFTER = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")


@dataclass(frozen=True, slots=True)
class Layer:
    """Attention or a recurrence, and an MLP or experts, each added to the residual stream; or only one of these, which
    is then the mixer, even an MLP or experts.

    norm: of their inputs; after: of their outputs, None: the same kind. parallel: the MLP reads attention's input.
    share: the factor of both before they are added; mlp_share: the MLP's, if it has another. scan: a recurrence that
    reads attention's input, and the factor of its output, which is added too. reads: factors of both inputs.
    """

    mixer: Mixer
    mlp: MLP | Experts | None
    norm: NormKind
    norms: Norms = BEFORE
    parallel: bool = False
    share: float = 1.0
    after: NormKind | None = None
    mlp_share: float | None = None
    scan: tuple[Mamba2, float] | None = None
    reads: tuple[float, float] = (1.0, 1.0)

    @property
    def share_of_mlp(self) -> float:
        """The factor of the MLP's output."""
        return self.share if self.mlp_share is None else self.mlp_share

    @property
    def inner(self) -> MLP | Experts | None:
        """Its MLP or experts."""
        return self.mixer if isinstance(self.mixer, MLP | Experts) else self.mlp

    @property
    def recurrence(self) -> Recurrence | None:
        """What keeps a state of a text in it."""
        if self.scan is not None:
            return self.scan[0]
        return None if isinstance(self.mixer, Attention | MLP | Experts) else self.mixer

    @property
    def attention(self) -> Attention:
        """The attention of a layer without a recurrence."""
        assert isinstance(self.mixer, Attention), "a recurrent layer has no attention"
        return self.mixer

    def products(self, hidden: int) -> tuple[Product, ...]:
        """In the order in which they are computed."""
        scans = () if self.scan is None else self.scan[0].products(hidden)
        recurrent = (replace(one, name=f"{RECURRENT}{one.name}") for one in scans)
        return *recurrent, *self.mixer.products(hidden), *(() if self.mlp is None else self.mlp.products(hidden))

    def vectors(self, hidden: int) -> Iterator[Vector]:
        """Its parameters besides those of the products."""
        for name, kind in zip(self.norms, (self.norm, self.after or self.norm) * 2, strict=True):
            if name is not None:
                yield from kind.vectors(name, hidden)
        if not isinstance(self.mixer, MLP | Experts):
            yield from self.mixer.vectors()
        if self.scan is not None:
            yield from self.scan[0].vectors()
        if isinstance(self.inner, Experts):
            yield from self.inner.vectors(hidden)


@dataclass(frozen=True, slots=True)
class Stack:
    """A decoder's layers and the parts around them.

    norm: the last one. embedding_scale: the factor of embeddings; embedding_norm: their norm, which heads that share
    the embedding do not apply. logit_scale: the factor of logits; logit_cap: logits l become
    ``logit_cap * tanh(l / logit_cap)``.
    """

    layers: tuple[Layer, ...]
    norm: NormKind
    embedding_scale: float = 1.0
    embedding_norm: NormKind | None = None
    logit_scale: float = 1.0
    logit_cap: float | None = None

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """The attentions of the layers that have one."""
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, Attention))

    @property
    def recurrence(self) -> Recurrence | None:
        """The recurrence of its recurrent layers, which are all alike; None if there are none."""
        return next((layer.recurrence for layer in self.layers if layer.recurrence is not None), None)

    @property
    def experts(self) -> Experts | None:
        """The experts of the first layer that has some; None if none has."""
        return next((layer.inner for layer in self.layers if isinstance(layer.inner, Experts)), None)

    @classmethod
    def uniform(cls, layers: int, attention: Attention, inner: int, norm: NormKind) -> Stack:
        """Llama's layers, all the same. inner: width of their MLPs."""
        return cls((Layer(attention, MLP(inner), norm),) * layers, norm)
