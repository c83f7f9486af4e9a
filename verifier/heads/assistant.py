"""Gemma 4's assistants: a few small layers that read the target's keys and values, and have none of their own.

::

    t, h     a token, and the state before it: the target's after its last norm, or for drafted tokens the assistant's
    x        pre_projection [E t; h]      E: the target's embedding, scaled
    layers   queries alone, over the keys and values of the target's last layer of the same kind that has its own
    y        norm(x)                      logits = U y
    h'       post_projection y            the state before the next token

Whatever the depth of a drafted token, its row has the position of the root and attends to committed tokens alone: the
root's own keys are not there yet, and those of drafted tokens never are. So nothing is written, siblings need no mask,
and what was not accepted leaves nothing behind::

    position     0 ..  length - window + 1 .. length - 1 | length
    attends      full: all ───────────────────────────>  | root, and all nodes below it
                        sliding: ─────────────────────>  |

A row is attended as the text's last one, whose keys are there: at ``length - 1`` with one position less of a window.

With clusters only some tokens get logits: those of the clusters whose centroids are likeliest. A file lists all tokens,
cluster by cluster (``token_ordering``); all clusters have the same size.

Legend: R rows, H the target's width, A the assistant's, V vocabulary, C tokens of a cluster, k clusters of a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from foresay.kvpaging import KVStore
from foresay.verifier.forward_batch import StaticRows
from foresay.verifier.heads.layouts import HeadTensors
from foresay.verifier.heads.reader import fill, known_ids, pack, taken
from foresay.verifier.model.config import FINAL_NORM, ModelConfig
from foresay.verifier.model.decoder import Decoder
from foresay.verifier.model.errors import WeightsError
from foresay.verifier.model.families import INSIDE
from foresay.verifier.model.fields import Fields
from foresay.verifier.model.forward import logits_of, run_layers
from foresay.verifier.model.layers import Attention, ExtraParameters, Layer
from foresay.verifier.model.linear import Linear
from foresay.verifier.model.products import Product
from foresay.verifier.model.quantization import HEAD
from foresay.verifier.model.weights import EMBEDDING
from foresay.verifier.ops.rows import take_rows
from foresay.verifier.ops.trees import known_tokens

#: The layers that assistants have, by ``model_type``.
_KINDS = ("gemma4_text", "gemma4_unified_text")
#: Parts of a Gemma 4 that no assistant has, by the keys that would say so.
_NEVER = ("hidden_size_per_layer_input", "enable_moe_block", "use_double_wide_mlp")
#: Modules outside layers; the list of all tokens, cluster by cluster; and where the output matrix may be.
_INTO, _BACK, _CENTROIDS = "pre_projection", "post_projection", "masked_embedding.centroids"
_ORDERING, _OUTPUTS = "masked_embedding.token_ordering", (EMBEDDING.removesuffix(".weight"), HEAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantConfig:
    """model: its layers, whose sources are layers of the target. clusters: how many there are, and how many of them get
    logits; None: all tokens do."""

    model: ModelConfig
    clusters: tuple[int, int] | None = None

    @classmethod
    def read(cls, directory: Path, target: ModelConfig) -> AssistantConfig:
        """The configuration in ``directory``; raises ConfigError, which names the file and the key."""
        fields = Fields.read(directory / "config.json")
        inside = fields.section("text_config")
        if inside is None:
            raise fields.error("text_config is missing, which describes the layers")
        for key in _NEVER:
            if inside.get(key):
                raise inside.error(f"{key} {inside.get(key)!r} is not supported for an assistant")
        if (kind := str(inside.get("model_type") or _KINDS[0])) not in _KINDS:
            raise inside.error(f"model_type {kind!r} is not supported; supported: {', '.join(_KINDS)}")
        # All its layers read keys and values of the target; by itself it would have none to share.
        values = {**inside.values, "architectures": [INSIDE[kind]], "num_kv_shared_layers": 0}
        model = ModelConfig.read(Fields(values, inside.where))
        width = fields.integer("backbone_hidden_size", target.hidden_size)
        for what, made, theirs in (
            ("hidden size", width, target.hidden_size),
            ("vocabulary", model.vocab_size, target.vocab_size),
        ):
            if made != theirs:
                raise fields.error(f"made for a {what} of {made}, but the target's is {theirs}")
        layers = tuple(_reading(fields, layer, target) for layer in model.stack.layers)
        stack = replace(model.stack, layers=layers, logit_cap=None)
        return cls(model=replace(model, stack=stack), clusters=_clusters(fields, target))

    def described(self, output: str, target: ModelConfig) -> ModelConfig:
        """All that its files have. output: the name of its output matrix there: that of an embedding that nothing else
        reads, or its own."""
        model, hidden, width = self.model, self.model.hidden_size, target.hidden_size
        sizes = {_INTO: (hidden, 2 * width), _BACK: (width, hidden), output: (target.vocab_size, hidden)}
        if self.clusters is not None:
            sizes[_CENTROIDS] = self.clusters[0], hidden
        products = tuple(Product(name, {name: outer}, inner) for name, (outer, inner) in sizes.items())
        outside = ExtraParameters(products, tuple(model.stack.norm.vectors(FINAL_NORM, hidden)))
        return replace(model, stack=replace(model.stack, extra=outside, whole=False))


def _reading(fields: Fields, layer: Layer, target: ModelConfig) -> Layer:
    """The layer with the target's last one of its kind that has keys and values as its source."""
    own, kind = layer.attention, "sliding" if layer.attention.window else "full"
    there = [
        (number, one)
        for number, one in enumerate(node.mixer for node in target.stack.layers)
        if isinstance(one, Attention) and one.source is None and (one.window is None) == (own.window is None)
    ]
    if not there:
        raise fields.error(f"has a layer of {kind} attention, but the target has none whose keys it could read")
    number, source = there[-1]
    for what, mine, theirs in (
        ("heads of keys", own.kv_heads, source.kv_heads),
        ("numbers in a head", own.head_dim, source.head_dim),
        ("positions in a window", own.window, source.window),
    ):
        if mine != theirs:
            raise fields.error(f"its layers of {kind} attention have {mine} {what}, but the target's have {theirs}")
    window = None if own.window is None else own.window - 1
    if window == 0:
        raise fields.error("sliding_window 1 leaves no committed token to attend to")
    return replace(layer, mixer=replace(own, source=number, window=window), scaled=True)


def _clusters(fields: Fields, target: ModelConfig) -> tuple[int, int] | None:
    if not fields.flag("use_ordered_embeddings", False):
        return None
    count = fields.integer("num_centroids", 2048)
    if target.vocab_size % count:
        raise fields.error(f"num_centroids {count} does not divide the vocabulary of {target.vocab_size}")
    return count, fields.integer("centroid_intermediate_top_k", 32, most=count)


@dataclass(frozen=True, slots=True)
class Clusters:
    """centroids: A to the number of clusters. tokens: int64[clusters, C]. chosen: k. output: [V, A]."""

    centroids: Linear
    tokens: Tensor
    chosen: int
    output: Tensor

    def logits(self, normed: Tensor) -> Tensor:
        """fp32[R, V], minus infinity for the tokens of other clusters."""
        likeliest = self.centroids.wide(normed).topk(self.chosen, dim=-1, sorted=False).indices
        tokens = self.tokens[likeliest].flatten(1)
        rows = self.output.index_select(0, tokens.flatten()).view(*tokens.shape, -1)
        found = torch.einsum("rca,ra->rc", rows.float(), normed.float())
        return found.new_full((len(normed), len(self.output)), -math.inf).scatter_(1, tokens, found)


class AssistantHead:
    """One assistant. Owns its weights, except the target's embedding.

    decoder: its layers, last norm and output matrix; its embedding is the target's. into: pre_projection. back:
    post_projection. clusters: None where all tokens get logits.
    """

    def __init__(
        self, config: AssistantConfig, decoder: Decoder, into: Linear, back: Linear, clusters: Clusters | None
    ) -> None:
        self.config, self.decoder, self._into, self._back, self._clusters = config, decoder, into, back, clusters
        self.dtype, self.device = decoder.dtype, decoder.device

    @classmethod
    def load(cls, directory: Path, target: Decoder) -> AssistantHead:
        """The assistant in ``directory``, in the target's dtype. Raises ConfigError or WeightsError, which name the
        file."""
        config, files = AssistantConfig.read(directory, target.config), HeadTensors.read(directory).renamed()
        output, *same = [name for name in _OUTPUTS if f"{name}.weight" in files.tensors] or _OUTPUTS[:1]
        for name in same:
            del files.tensors[f"{name}.weight"]
        tokens = taken(files, _ORDERING, target.config.vocab_size)
        model = config.described(output, target.config)
        weights = fill(files, model, target)
        matrices = weights.outside.matrices
        into, back = (Linear(matrices[name], None, target.dtype) for name in (_INTO, _BACK))
        rows, clusters, where = matrices[output], None, f"{files.where}: {_ORDERING}"
        assert isinstance(rows, Tensor), "only floats"
        if config.clusters is not None:
            if tokens is None:
                raise WeightsError(f"{where} is missing")
            ids = known_ids(tokens.long(), len(rows), where).view(config.clusters[0], -1).to(target.device)
            clusters = Clusters(Linear(matrices[_CENTROIDS], None, target.dtype), ids, config.clusters[1], rows)
        head = Linear(rows if clusters is None else rows[:1], None, target.dtype)
        packed = pack(model, weights, target.embedding, head)
        return cls(config, Decoder(model, packed, target.max_positions), into, back, clusters)

    @torch.inference_mode()
    def paged(self, rows: StaticRows, hidden: Tensor, store: KVStore) -> tuple[Tensor, Tensor]:
        """Logits, fp32[R, V], and the states to continue from, [R, H].

        rows: each attended as a text's last row, at the position of its root. hidden: [R, H], the state before each.
        store: the target's.
        """
        tokens = known_tokens(rows.tokens, len(self.decoder.embedding))
        embedded = take_rows(self.decoder.embedding, tokens, rows.count)
        x = self._into(torch.cat((embedded, hidden), dim=-1), rows.count)
        normed = run_layers(self.decoder, rows, store, x)[0]
        clusters = self._clusters
        logits = logits_of(self.decoder, normed, rows.count) if clusters is None else clusters.logits(normed)
        return logits, self._back(normed, rows.count)
