"""Extra layers in checkpoints that predict further tokens (MTP), as data. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.layers import BEFORE, Attention, Layer

#: Heads' names of the matrix that mixes both inputs; of the norms of these, and of the last norm.
MIXES, EMBEDDING, HIDDEN, LAST = "fc", "embedding_layernorm", "hidden_norm", "norm"
#: And of its layer; names that a layout does not list belong to it.
_LAYER = "layers.0"
#: Small models that do the same for a target, in directories of their own (:mod:`foresay.verifier.heads.assistant`), by
#: ``model_type``.
ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")


@dataclass(frozen=True, slots=True)
class MtpLayout:
    """One layout of such a layer.

    prefix: of all its names; ``{}``: the number of the target's layers. names: of modules, by their names after the
    prefix; None: the target's is used. Without ``LAST`` it uses the target's last norm. raw: it reads, and returns,
    states before a last norm, not after it. state_first: its matrix has the state before the embedding.
    """

    prefix: str
    names: Mapping[str, str | None]
    raw: bool = False
    state_first: bool = False

    def prefix_of(self, model: ModelConfig) -> str:
        """The prefix for this target."""
        return self.prefix.format(model.num_layers)

    def ours(self, module: str) -> str | None:
        """A module's name in heads; None for the target's modules."""
        known = next((name for name in self.names if module == name or module.startswith(f"{name}.")), None)
        if known is None:
            return f"{_LAYER}.{module}"
        return None if self.names[known] is None else f"{self.names[known]}{module[len(known) :]}"


LAYOUTS = (
    # Qwen3.5
    MtpLayout(
        "mtp.",
        {"fc": MIXES, "pre_fc_norm_embedding": EMBEDDING, "pre_fc_norm_hidden": HIDDEN, "norm": LAST, _LAYER: _LAYER,
         "embed_tokens": None, "shared_head": None},
    ),
    # DeepSeek-V3, GLM-4.5 and later: a layer after the last
    MtpLayout(
        "model.layers.{}.",
        {"eh_proj": MIXES, "enorm": EMBEDDING, "hnorm": HIDDEN, "shared_head.norm": LAST, "shared_head.head": None,
         "embed_tokens": None},
    ),
    # MiMo
    MtpLayout(
        "model.mtp_layers.0.",
        {"input_proj": MIXES, "token_layernorm": EMBEDDING, "hidden_layernorm": HIDDEN, "final_layernorm": LAST},
        raw=True,
        state_first=True,
    ),
    # ERNIE 4.5
    MtpLayout(
        "model.mtp_",
        {"linear_proj.0": MIXES, "emb_norm.0": EMBEDDING, "hidden_norm.0": HIDDEN, "block.0": _LAYER},
    ),
)  # fmt: skip


def prefixes(names: Iterable[str]) -> tuple[str, ...]:
    """The name prefixes of all MTP tensors, which are not the target's."""
    behind = (name.removesuffix("eh_proj.weight") for name in names if name.endswith(".eh_proj.weight"))
    return "mtp.", "model.mtp_", *behind


def mtp_layer(model: ModelConfig) -> Layer | None:
    """Its layer, with the shape of the target's last attention layer. None if heads do not support it: one with norms
    before and after."""
    layer = next((each for each in reversed(model.stack.layers) if isinstance(each.mixer, Attention)), None)
    plain = model.stack.embedding_scale == 1.0 and model.stack.embedding_norm is None
    if layer is None or layer.norms != BEFORE or layer.parallel or layer.residual_mul != 1.0 or layer.norm.centred:
        return None
    return layer if plain and not layer.attention.sinks else None


def mtp_layout(names: Collection[str], model: ModelConfig) -> MtpLayout | None:
    """The layout of a target's MTP layer; None if there is none, or an unknown one. names: of all tensors."""
    if mtp_layer(model) is None:
        return None
    return next((one for one in LAYOUTS if any(name.startswith(one.prefix_of(model)) for name in names)), None)
