"""Layers that checkpoints have beside the target's to predict further tokens (MTP), as data. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.nodes import BEFORE, Attention, Layer

#: What heads call the matrix that mixes both that they read; the norms of these, of what attention reads, and the last.
MIXES, EMBEDDING, HIDDEN, FUSED, LAST = (
    "fc", "embedding_layernorm", "hidden_norm", "fused_layernorm", "pre_lm_head_layernorm"
)  # fmt: skip
#: And its layer; what a layout does not name is of that.
_LAYER = "layers.0"


@dataclass(frozen=True, slots=True)
class Beside:
    """How some checkpoints have one.

    prefix: of all its names; ``{}``: how many layers the target has. names: of modules, by what they are called behind
    that; None: the target's is used. Without ``LAST`` the target's last norm is its too. raw: it reads, and hands on,
    states before a last norm, not behind it. state_first: its matrix reads the state before the embedding.
    """

    prefix: str
    names: Mapping[str, str | None]
    raw: bool = False
    state_first: bool = False

    def prefix_of(self, model: ModelConfig) -> str:
        """Beside this target."""
        return self.prefix.format(model.num_layers)

    def ours(self, module: str) -> str | None:
        """What a module is called in heads; None for what is the target's."""
        known = next((name for name in self.names if module == name or module.startswith(f"{name}.")), None)
        if known is None:
            own: str | None = f"{_LAYER}.{module}"
        else:
            own = None if self.names[known] is None else f"{self.names[known]}{module[len(known) :]}"
        return FUSED if own == f"{_LAYER}.{BEFORE.before_attention}" else own


LAYOUTS = (
    # Qwen3.5
    Beside(
        "mtp.",
        {"fc": MIXES, "pre_fc_norm_embedding": EMBEDDING, "pre_fc_norm_hidden": HIDDEN, "norm": LAST, _LAYER: _LAYER},
    ),
    # DeepSeek-V3, GLM-4.5 and later: a layer behind the last
    Beside(
        "model.layers.{}.",
        {"eh_proj": MIXES, "enorm": EMBEDDING, "hnorm": HIDDEN, "shared_head.norm": LAST, "shared_head.head": None,
         "embed_tokens": None},
    ),
    # MiMo
    Beside(
        "model.mtp_layers.0.",
        {"input_proj": MIXES, "token_layernorm": EMBEDDING, "hidden_layernorm": HIDDEN, "final_layernorm": LAST},
        raw=True,
        state_first=True,
    ),
    # ERNIE 4.5
    Beside(
        "model.mtp_",
        {"linear_proj.0": MIXES, "emb_norm.0": EMBEDDING, "hidden_norm.0": HIDDEN, "block.0": _LAYER},
    ),
)  # fmt: skip


def prefixes(names: Iterable[str]) -> tuple[str, ...]:
    """How the names of all begin that predict further tokens, and are not the target's."""
    behind = (name.removesuffix("eh_proj.weight") for name in names if name.endswith(".eh_proj.weight"))
    return "mtp.", "model.mtp_", *behind


def layer_beside(model: ModelConfig) -> Layer | None:
    """What its layer is like: as the target's last that attends. None if no head has such: one with norms on both
    sides."""
    layer = next((each for each in reversed(model.stack.layers) if isinstance(each.mixer, Attention)), None)
    plain = model.stack.embedding_scale == 1.0 and model.stack.embedding_norm is None
    if layer is None or layer.norms != BEFORE or layer.parallel or layer.share != 1.0 or layer.norm.centred:
        return None
    return layer if plain and not layer.attention.sinks else None


def beside(names: Collection[str], model: ModelConfig) -> Beside | None:
    """The layout of the one beside a target; None if there is none, or none that is known. names: of all tensors."""
    if layer_beside(model) is None:
        return None
    return next((one for one in LAYOUTS if any(name.startswith(one.prefix_of(model)) for name in names)), None)
