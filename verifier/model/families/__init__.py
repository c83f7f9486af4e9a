"""The families of decoders, by their names in config.json.

A family's function turns the configuration into a :class:`~foresay.verifier.model.layers.Stack`, and its entry has the
names in its GGUF files. No other code depends on a family's name. Imports no torch.
"""

from __future__ import annotations

from foresay.verifier.model.families import gemma, hybrids, llama, mamba, moe
from foresay.verifier.model.families.family import Family
from foresay.verifier.model.fields import Fields

#: In the order in which messages list them.
FAMILIES: dict[str, Family] = {
    **llama.LLAMA, **gemma.GEMMA, **llama.GRANITE, **gemma.OLMO, **llama.ROTATED, **gemma.MUSE, **hybrids.QWEN,
    **hybrids.LFM, **moe.MIXTURES, **moe.LATENTS, **mamba.FAMILIES,
}  # fmt: skip

#: Models of texts and images, of which the text part is loaded: by the ``model_type`` of their ``text_config``.
WRAPPED = (
    "Gemma3ForConditionalGeneration", "Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration",
    "Mistral3ForConditionalGeneration", "MuseGlimmerForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration",
)  # fmt: skip
INSIDE = {
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "muse_glimmer_text": "MuseGlimmerForConditionalGeneration",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}


def unwrapped(fields: Fields) -> Fields:
    """The configuration of the text model, which for most models is all of it."""
    names, inside = fields.get("architectures"), fields.section("text_config")
    if not isinstance(names, list) or names[:1] not in [[name] for name in WRAPPED] or inside is None:
        return fields
    kind = inside.get("model_type")
    if kind not in INSIDE:
        raise inside.error(f"model_type {kind!r} is not supported; supported: {', '.join(INSIDE)}")
    outside = {
        key: fields.values[key]
        for key in ("eos_token_id", "quantization_config", "dtype", "torch_dtype", "tie_word_embeddings")
        if fields.get(key)
    }
    return Fields({**outside, **inside.values, "architectures": [INSIDE[kind]]}, inside.where)
