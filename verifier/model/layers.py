"""The parts of a decoder: nodes that describe their parameters and computation. Imports no torch.

::

    Stack   embedding x scale ── Layer ── Layer ── ... ── norm ── head x scale, capped
    Layer   x += share * after(mixer(before(x)))           attention, a recurrence, or both; norms before or after
            x += share * after(mlp(before(x)))             an MLP, experts or both; parallel: of the same before(x)
            x += embedding of this layer; x *= scalar      where a model has these

Everything that depends on a model's shape (loading, checking, sizes, quantising, writing, GGUF, the forward pass) reads
these records; a family (:mod:`foresay.verifier.model.families`) makes them from a config.json.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from foresay.verifier.model.feed_forward import DENSE_MLP, MLP, Experts
from foresay.verifier.model.per_layer import PerLayerEmbedding
from foresay.verifier.model.products import (
    HEAD_GATE,
    MODULES,
    OUTPUT,
    QKV,
    RECURRENT,
    NormKind,
    Product,
    Vector,
)
from foresay.verifier.model.recurrences import Mamba2, Recurrence
from foresay.verifier.model.rope_config import QueryScaling, RopeConfig


@dataclass(frozen=True, slots=True)
class QKNorm:
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
    source: the number of the earlier layer whose keys and values it reads instead of having its own; None: none. width:
    of its input; None: the layer's. first: positions below are not attended to. causal: False where rows of a
    block see all of it.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: RopeConfig | None
    window: int | None = None
    biases: tuple[str, ...] = ()
    norm: QKNorm | None = None
    softcap: float | None = None
    sinks: bool = False
    gated: bool = False
    query_scaling: QueryScaling | None = None
    fused: str | None = None
    interleaved: bool = False
    values_from_keys: bool = False
    value_norm: NormKind | None = None
    source: int | None = None
    width: int | None = None
    first: int = 0
    causal: bool = True

    def __post_init__(self) -> None:
        if self.value_norm is not None:
            assert self.norm is not None, "values are normalised next to queries and keys"
            assert self.norm.kind.eps == self.value_norm.eps, "with one epsilon"
            assert not self.value_norm.weighted, "and without weight"

    @property
    def rotary_dim(self) -> int:
        """How many numbers of a head the rotary table is for."""
        return self.head_dim

    @property
    def cached_value_dim(self) -> int:
        """How many numbers of a head's value are kept besides the key."""
        return self.head_dim

    @property
    def parts(self) -> int:
        """How many of queries, keys and values are computed."""
        return 1 if self.source is not None else 2 if self.values_from_keys else 3

    @property
    def unused(self) -> tuple[str, ...]:
        """Modules that files may have although nothing reads them: keys and values of layers that use another's."""
        return () if self.source is None else UNUSED

    def products(self, hidden: int) -> tuple[Product, ...]:
        """The products into its heads, their gates, and out of them."""
        read = self.width or hidden
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        into = dict(zip(MODULES[QKV][: self.parts], (queries * (1 + self.interleaved), keys, keys), strict=False))
        into = into if self.fused is None else {self.fused: sum(into.values())}
        apart = self.gated and not self.interleaved
        gates = (Product(HEAD_GATE, {MODULES[HEAD_GATE][0]: queries}, read),) if apart else ()
        return (
            Product(QKV, into, read, QKV in self.biases),
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
UNUSED = ("self_attn.k_proj", "self_attn.v_proj", "self_attn.k_norm", "self_attn.v_norm")
#: The number that multiplies a layer's output.
SCALAR = "layer_scalar"
Mixer = Attention | Recurrence | MLP | Experts


@dataclass(frozen=True, slots=True)
class Norms:
    """A layer's norms, by the names of their modules: of the inputs of attention and MLP, and of their outputs. Where
    experts stand beside the MLP, ``after_mlp`` is that of the sum of both, and there are the input's and output's of
    the experts, and the output's of the MLP alone."""

    before_attention: str | None = None
    after_attention: str | None = None
    before_mlp: str | None = None
    after_mlp: str | None = None
    before_experts: str | None = None
    after_experts: str | None = None
    after_dense: str | None = None

    def __iter__(self) -> Iterator[str]:
        each = (
            self.before_attention, self.after_attention, self.before_mlp, self.after_mlp, self.before_experts,
            self.after_experts, self.after_dense,
        )  # fmt: skip
        yield from (name for name in each if name is not None)

    @property
    def outputs(self) -> frozenset[str]:
        """Those of outputs."""
        each = (self.after_attention, self.after_mlp, self.after_experts, self.after_dense)
        return frozenset(name for name in each if name is not None)


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
    residual_mul: the factor of both before they are added; mlp_scale: the MLP's, if it has another. scan: a recurrence
    that reads attention's input, and the factor of its output, which is added too. input_scales: factors of both
    inputs. experts: those beside the MLP, which read the same stream through norms of their own. embedding: this
    layer's own, which is added last. scaled: whether the stream is then multiplied by the layer's ``layer_scalar``.
    """

    mixer: Mixer
    mlp: MLP | Experts | None
    norm: NormKind
    norms: Norms = BEFORE
    parallel: bool = False
    residual_mul: float = 1.0
    after: NormKind | None = None
    mlp_scale: float | None = None
    scan: tuple[Mamba2, float] | None = None
    input_scales: tuple[float, float] = (1.0, 1.0)
    experts: Experts | None = None
    embedding: PerLayerEmbedding | None = None
    scaled: bool = False

    def __post_init__(self) -> None:
        more = self.experts is not None or self.embedding is not None or self.scaled
        assert not more or isinstance(self.mlp, MLP), "what ends a layer comes behind its MLP"

    @property
    def mlp_residual_mul(self) -> float:
        """The factor of the MLP's output."""
        return self.residual_mul if self.mlp_scale is None else self.mlp_scale

    @property
    def feed_forward(self) -> MLP | Experts | None:
        """Its MLP or experts; of both the experts."""
        return self.mixer if isinstance(self.mixer, MLP | Experts) else self.experts or self.mlp

    @property
    def width(self) -> int:
        """The total inner width that a row passes through, of its MLP and experts."""
        both = (self.feed_forward, self.mlp if self.experts is not None else None)
        return sum(each.width for each in both if each is not None)

    @property
    def recurrence(self) -> Recurrence | None:
        """What keeps a state of a text in it."""
        if self.scan is not None:
            return self.scan[0]
        return None if isinstance(self.mixer, Attention | MLP | Experts) else self.mixer

    @property
    def stores(self) -> bool:
        """Whether rows of later positions read anything that it keeps of a row."""
        own = isinstance(self.mixer, Attention) and self.mixer.source is None
        return own or self.recurrence is not None

    @property
    def attention(self) -> Attention:
        """The attention of a layer without a recurrence."""
        assert isinstance(self.mixer, Attention), "a recurrent layer has no attention"
        return self.mixer

    def products(self, hidden: int) -> tuple[Product, ...]:
        """In the order in which they are computed."""
        scans = () if self.scan is None else self.scan[0].products(hidden)
        recurrent = (replace(one, name=f"{RECURRENT}{one.name}") for one in scans)
        inside = () if self.mlp is None else self.mlp.products(hidden)
        if self.experts is not None:  # the MLP is then called as one that all rows share
            inside = (*(replace(one, name=DENSE_MLP[one.name]) for one in inside), *self.experts.products(hidden))
        own = () if self.embedding is None else self.embedding.products(hidden)
        return *recurrent, *self.mixer.products(hidden), *inside, *own

    def kind_of(self, norm: str) -> NormKind:
        """The kind of one of its norms."""
        return self.after or self.norm if norm in self.norms.outputs else self.norm

    def vectors(self, hidden: int) -> Iterator[Vector]:
        """Its parameters besides those of the products."""
        for name in self.norms:
            yield from self.kind_of(name).vectors(name, hidden)
        if self.embedding is not None:
            yield from self.embedding.vectors(hidden)
        if self.scaled:
            yield Vector(SCALAR, 1)
        if not isinstance(self.mixer, MLP | Experts):
            yield from self.mixer.vectors()
        if self.scan is not None:
            yield from self.scan[0].vectors()
        if isinstance(self.feed_forward, Experts):
            yield from self.feed_forward.vectors(hidden)


@dataclass(frozen=True, slots=True)
class ExtraParameters:
    """Parameters that belong to no layer: products and vectors, whose modules have their whole names."""

    products: tuple[Product, ...] = ()
    vectors: tuple[Vector, ...] = ()


@dataclass(frozen=True, slots=True)
class Stack:
    """A decoder's layers and the parts around them.

    norm: the last one. embedding_scale: the factor of embeddings; embedding_norm: their norm, which heads that share
    the embedding do not apply. logit_scale: the factor of logits; logit_cap: logits l become
    ``logit_cap * tanh(l / logit_cap)``. extra: of a head, parameters besides its layers'. whole: False for a head,
    whose embedding, last norm and output matrix may be the target's: those that are not are in ``extra``.
    """

    layers: tuple[Layer, ...]
    norm: NormKind
    embedding_scale: float = 1.0
    embedding_norm: NormKind | None = None
    logit_scale: float = 1.0
    logit_cap: float | None = None
    extra: ExtraParameters = ExtraParameters()
    whole: bool = True

    @property
    def embedding(self) -> PerLayerEmbedding | None:
        """The embeddings that its layers have of their own: all do, or none."""
        return next((layer.embedding for layer in self.layers), None)

    def parameters(self, hidden: int) -> ExtraParameters:
        """All that belong to no layer, besides embedding, last norm and output matrix."""
        if (own := self.embedding) is None:
            return self.extra
        return ExtraParameters((own.projection(hidden, len(self.layers)),), tuple(own.outside()))

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """The attentions of the layers that have one."""
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, Attention))

    @property
    def num_kv_layers(self) -> int:
        """The number of layers up to the last that stores something of each row; after it no row reads another."""
        return max((number for number, layer in enumerate(self.layers, start=1) if layer.stores), default=0)

    @property
    def recurrence(self) -> Recurrence | None:
        """The recurrence of its recurrent layers, which are all alike; None if there are none."""
        return next((layer.recurrence for layer in self.layers if layer.recurrence is not None), None)

    @property
    def experts(self) -> Experts | None:
        """The experts of the first layer that has some; None if none has."""
        return next((layer.feed_forward for layer in self.layers if isinstance(layer.feed_forward, Experts)), None)

    @classmethod
    def uniform(cls, layers: int, attention: Attention, inner: int, norm: NormKind) -> Stack:
        """Llama's layers, all the same. inner: width of their MLPs."""
        return cls((Layer(attention, MLP(inner), norm),) * layers, norm)
