"""The names of tensors and modules here, which are Llama's, by those in files of other families; and of files."""

from __future__ import annotations

import re
from functools import lru_cache

#: Files of tokenizer and generation settings, which every model with the same vocabulary may share.
SHARED_FILES = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tekken.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "*.jinja",
    "chat_template.json",
]
#: Prefixes in models of texts and images, and the corresponding ones in text models.
_INSIDE = {"language_model.model.": "model.", "model.language_model.": "model.", "language_model.lm_head.": "lm_head."}
#: Tensor names of LFM2's and Granite 4's checkpoints that differ from all others'.
_CALLED = {
    "model.embedding_norm.": "model.norm.",
    ".operator_norm.": ".input_layernorm.",
    ".ffn_norm.": ".post_attention_layernorm.",
    ".feed_forward.w1.": ".mlp.gate_proj.",
    ".feed_forward.w3.": ".mlp.up_proj.",
    ".feed_forward.w2.": ".mlp.down_proj.",
    ".self_attn.out_proj.": ".self_attn.o_proj.",
    ".self_attn.q_layernorm.": ".self_attn.q_norm.",
    ".self_attn.k_layernorm.": ".self_attn.k_norm.",
    ".shared_mlp.input_linear.": ".mlp.gate_up_proj.",
    ".shared_mlp.output_linear.": ".mlp.down_proj.",
}
#: And Nemotron-H's, whose layers have one of these each; and Falcon-H1's.
_ALONE = tuple(
    (re.compile(pattern), ours)
    for pattern, ours in (
        (r"^backbone\.", "model."),
        (r"^model\.embeddings\.", "model.embed_tokens."),
        (r"^model\.norm_f\.", "model.norm."),
        (r"^(model\.layers\.\d+)\.norm\.", r"\1.input_layernorm."),
        (r"\.mixer\.(?=[qkvo]_proj\.)", ".self_attn."),
        (r"\.mixer\.(?=(?:(?:up|down)_proj|gate|experts|shared_experts)\.)", ".mlp."),
        (r"\.mixer\.", ".mamba."),
        (r"^model\.final_layernorm\.", "model.norm."),
        (r"\.pre_ff_layernorm\.", ".post_attention_layernorm."),
        (r"\.feed_forward\.(?=(?:gate|up|down)_proj\.)", ".mlp."),
    )
)


def tensor_name(stored: str) -> str:
    """A tensor's name here. stored: its name in a file."""
    begun = next((prefix for prefix in _INSIDE if stored.startswith(prefix)), None)
    own = stored if begun is None else _INSIDE[begun] + stored.removeprefix(begun)
    for pattern, ours in _ALONE:
        own = pattern.sub(ours, own)
    called = next((part for part in _CALLED if part in own), None)
    return own if called is None else own.replace(called, _CALLED[called])


#: Parts of Nemotron-H's and Falcon-H1's names, by ours.
_THEIRS = ((".self_attn.", ".mixer."), (".mlp.", ".mixer."), (".mamba.", ".mixer."), (".mlp.", ".feed_forward."))


@lru_cache(maxsize=8192)
def stored_names(module: str, pattern: str) -> tuple[str, ...]:
    """The names that a pattern may mean by a module, its own first: patterns cannot be translated, and mean the names
    of their family, of which they have a word. Others would match where a pattern excludes a name."""
    name = f"{module}."
    parts = (*((ours, theirs) for theirs, ours in _CALLED.items()), *_THEIRS)
    meant = [(ours, theirs) for ours, theirs in parts if ours in name and _has_word(pattern, theirs, ours)]
    names = [name, *(name.replace(*both) for both in meant)]
    prefixes = ("backbone.", *(theirs for theirs, ours in _INSIDE.items() if ours == "model."))
    begun = [prefix for prefix in prefixes if _has_word(pattern, prefix, "model.")]
    inside = [theirs + each.removeprefix("model.") for each in names if each.startswith("model.") for theirs in begun]
    return tuple(each.removesuffix(".") for each in (*names, *inside))


def _has_word(pattern: str, theirs: str, ours: str) -> bool:
    """Whether a pattern has a word of a name that is not in ours."""
    return any(word in pattern for word in set(theirs.split(".")) - set(ours.split(".")))


def module_name(stored: str) -> str:
    """A module's name here, or of a part of it. stored: its name in a configuration, which may begin anywhere."""
    return tensor_name(f"{stored.replace('language_model.', '', 1)}.").removesuffix(".")
