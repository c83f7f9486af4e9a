"""What Gemma 4's layers have besides attention and an MLP: a number that scales their output, embeddings of their own,
and experts beside the MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from foresay.verifier.model.families.family import mlp, rms_norm
from foresay.verifier.model.families.moe import OWN_WIDTH, experts
from foresay.verifier.model.feed_forward import GGUF_STACKS, Experts, TopKRouter
from foresay.verifier.model.fields import Fields
from foresay.verifier.model.layers import SANDWICH, Stack
from foresay.verifier.model.per_layer import PerLayerEmbedding
from foresay.verifier.model.products import DOWN, GATE_UP, Stacked

#: The norms of a layer with experts beside its MLP.
_BESIDE = replace(
    SANDWICH,
    before_experts="pre_feedforward_layernorm_2",
    after_experts="post_feedforward_layernorm_2",
    after_dense="post_feedforward_layernorm_1",
)
#: The width of what a layer reads of its own embedding.
_WIDTH = "hidden_size_per_layer_input"
#: Whether the table of these embeddings is in few bits: of configurations made from GGUF files alone.
IN_BLOCKS = "per_layer_input_in_blocks"
_MODULES = ("experts.{}.gate_proj", "experts.{}.up_proj", "experts.{}.down_proj")
_STACKS: Mapping[str, tuple[Stacked, ...]] = {
    GATE_UP: (Stacked("experts.gate_up_proj", (0, 1)), *GGUF_STACKS[GATE_UP]),
    DOWN: (Stacked("experts.down_proj"), *GGUF_STACKS[DOWN]),
}


def with_extras(fields: Fields, made: Stack) -> Stack:
    """The same layers with all of that, as far as the configuration has it."""
    own, beside = _embedding(fields), _experts(fields)
    norms = SANDWICH if beside is None else _BESIDE
    layers = (replace(each, norms=norms, experts=beside, embedding=own, scaled=True) for each in made.layers)
    return replace(made, layers=tuple(layers))


def _embedding(fields: Fields) -> PerLayerEmbedding | None:
    width = 0 if fields.get(_WIDTH) is None else fields.integer(_WIDTH, minimum=0)
    if not width:
        return None
    tokens, known = fields.integer("vocab_size_per_layer_input", 262_144), fields.integer("vocab_size")
    if tokens < known:
        raise fields.error(f"vocab_size_per_layer_input {tokens} is less than vocab_size {known}")
    return PerLayerEmbedding(width, tokens, rms_norm(fields, wide=True), fields.flag(IN_BLOCKS, False))


def _experts(fields: Fields) -> Experts | None:
    if not fields.flag("enable_moe_block", False):
        return None
    router = TopKRouter("router.proj", factors="router.per_expert_scale", scaled="router.scale")
    one = mlp(fields, "gelu", "hidden_activation", width=OWN_WIDTH)
    return experts(fields, router, one=one, each="top_k_experts", modules=_MODULES, stacked=_STACKS)
