"""The layouts that heads are published in, as data: how each is recognised, and where its files have what.

The layers' keys are those of a Llama or Qwen3 configuration. Layers, heads and blocks are counted from the tensor
names, since published configurations are wrong about them.

The tensors of a head's directory are read in any format: safetensors if there are any, in one file or several; else a
PyTorch pickle, read with ``weights_only`` so that nothing in it can run. Heads are small: all tensors of a directory
are read, and checked by the caller.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor

from foresay.verifier.model.checkpoint import INDEX, SINGLE, header_names
from foresay.verifier.model.errors import WeightsError
from foresay.verifier.model.fields import Fields
from foresay.verifier.model.gguf.file import LINK, GgufFile
from foresay.verifier.model.gguf.weights import GgufTensors
from foresay.verifier.model.mtp_layout import ASSISTANTS
from foresay.verifier.model.safetensors_file import StoredTensors
from foresay.verifier.model.save_quantized import write_int8

_PICKLES = "pytorch_model.bin.index"
#: Weight files by name, the preferred one first.
NAMES = ("medusa_lm_head.safetensors", SINGLE, INDEX, "medusa_lm_head.pt", "pytorch_model.bin", f"{_PICKLES}.json")


@dataclass(frozen=True, slots=True)
class HeadTensors:
    """All tensors of a head by name, and their source, for messages. gguf: whether it is a GGUF file."""

    tensors: dict[str, Tensor]
    where: str
    gguf: bool = False

    @classmethod
    def read(cls, directory: Path, prefix: str = "") -> HeadTensors:
        """Raises WeightsError, which names the file, if there is none or one is broken.

        prefix: if any name begins with it, the others (a whole model's) are not read.
        """
        if (directory / LINK).is_symlink():
            return cls(*_of_gguf((directory / LINK).readlink(), prefix), gguf=True)
        path = next((directory / name for name in NAMES if (directory / name).exists()), None)
        if path is None:
            raise WeightsError(f"{directory}: there are no weights of a head; looked for {', '.join(NAMES)}")
        tensors = _sharded(path, prefix) if path.suffix == ".json" else _tensors(path, prefix)
        return cls({name: tensors[name] for name in _inside(tensors, prefix)}, str(path))

    def renamed(self) -> HeadTensors:
        """The same by their names here, from any layout, without those that are not used."""
        used = {_short(name): tensor for name, tensor in self.tensors.items() if not IGNORED.search(name)}
        return replace(self, tensors=used)


def _of_gguf(path: Path, prefix: str) -> tuple[dict[str, Tensor], str]:
    """The dequantised tensors of a GGUF file whose names begin with the prefix."""
    file, found = GgufFile.read(path), dict[str, Tensor]()
    for part in file.files:
        tensors = GgufTensors.open(file, part)
        for name in tensors.offset_keys():
            if name.startswith(prefix):
                tensor = tensors.get_tensor(name)
                found[name] = tensor if isinstance(tensor, Tensor) else tensor.plain()
    return found, str(path)


def quantize(directory: Path, out: Path) -> None:
    """Write a head with its float matrices in int8. Raises WeightsError if its files are broken, or it is already
    quantised."""
    head = HeadTensors.read(directory)
    if any(name.endswith("_scale") for name in head.tensors):
        raise WeightsError(f"{head.where}: is quantised already")
    write_int8(head.tensors, Fields.read(directory / "config.json").values, out)


def _index(path: Path) -> dict[str, str]:
    section = Fields.read(path).section("weight_map")
    return {} if section is None else {str(name): str(file) for name, file in section.values.items()}


def _inside(names: Iterable[str], prefix: str) -> list[str]:
    """The names that begin with the prefix; all if there are none."""
    known = list(names)
    return [name for name in known if name.startswith(prefix)] or known


def _sharded(index: Path, prefix: str) -> dict[str, Tensor]:
    files = _index(index)
    if not files:
        raise WeightsError(f"{index}: weight_map must name a file for each tensor")
    parts = (_tensors(index.parent / file, prefix) for file in sorted({files[name] for name in _inside(files, prefix)}))
    return {name: tensor for part in parts for name, tensor in part.items()}


def _tensors(path: Path, prefix: str) -> dict[str, Tensor]:
    try:
        if path.suffix != ".safetensors":
            return _unpickled(path)
        stored = StoredTensors.open(path)
        return {name: stored.get_tensor(name) for name in _inside(stored.offset_keys(), prefix)}
    except FileNotFoundError as error:
        raise WeightsError(f"{path}: not there; the download may be incomplete") from error
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{path}: not a complete safetensors file ({error})") from error


def _unpickled(path: Path) -> dict[str, Tensor]:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # with a damaged file the reader may fail in any way
        raise WeightsError(
            f"{path}: not a complete file of tensors only: it is cut off or damaged, or holds code, which is never run"
        ) from error
    if not isinstance(found, dict) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
        raise WeightsError(f"{path}: holds something other than named tensors")
    return {str(name): tensor for name, tensor in found.items()}


Kind = Literal["medusa", "eagle", "dflash", "assistant"]
#: Keys of config.json, any one of which suffices, with their values; None for any value but null and false.
Marks = Mapping[str, tuple[object, ...] | None]

#: Files that a head's repository may hold besides those of a model.
PATTERNS = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "pytorch_model*.bin", "pytorch_model.bin.index.json")


@dataclass(frozen=True, slots=True)
class Layout:
    """One of them.

    own, layer: the sections of what is the head's and of its layers' keys, if they are not at the top. mixes: the key
    that lists the target's layers. counts: whether it numbers their inputs or outputs; either: files do not say, and a
    list that begins with 1 is one of outputs (SGLang's). normed: the last layer's output is read after the final norm.
    generation: of EAGLE. parallel: P-EAGLE. markov: DSpark. slides, anchored: whether all layers slide, and the
    anchor guesses too, where the file does not say. causal: whether sliding layers are.
    """

    kind: Kind
    marks: Marks
    own: str | None = None
    layer: str | None = None
    mixes: str = ""
    counts: Literal["inputs", "outputs", "either"] = "inputs"
    normed: bool = False
    generation: Literal[1, 3] = 3
    parallel: bool = False
    markov: bool = False
    slides: bool = False
    anchored: bool = False
    causal: bool = True


#: The section of a head's configuration with how often its first choice was right in an evaluation: lists by depth,
#: given that all above were right, "greedy" and "sampled" at temperature 1. Drafting starts from these.
ACCEPTANCE = "acceptance"

_TYPE, _NESTED = "speculators_model_type", "transformer_layer_config"
_AUX, _EAGLE_AUX, _TARGET = "aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids", "target_layer_ids"
_EAGLE3 = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Qwen3ForCausalLMEagle3", "Eagle3Speculator")
_DSPARK = {"architectures": ("Qwen3DSparkModel",), "markov_rank": None, "projector_type": ("dspark",)}
_DFLASH2 = {"architectures": ("DFlash2DraftModel",)}
_DFLASH = {"architectures": ("DFlashDraftModel", *_DFLASH2["architectures"]), "dflash_config": None}

#: The first one with a matching mark is used.
LAYOUTS = (
    # The authors' (also Medusa-2), vLLM's.
    Layout("medusa", {"model_type": ("medusa",), "medusa_num_heads": None}),
    # Gemma 4's, which verifier/heads/assistant.py reads.
    Layout("assistant", {"model_type": ASSISTANTS}),
    # speculators'.
    Layout("eagle", {_TYPE: ("eagle",)}, layer=_NESTED, generation=1),
    Layout("eagle", {_TYPE: ("eagle3",)}, layer=_NESTED, mixes=_EAGLE_AUX, counts="either"),
    Layout("eagle", {_TYPE: ("peagle",)}, layer=_NESTED, mixes=_EAGLE_AUX, counts="either", parallel=True),
    Layout("dflash", {_TYPE: ("dspark",)}, layer=_NESTED, mixes=_AUX, markov=True, anchored=True),
    Layout("dflash", {_TYPE: ("dflash", "dflash2")}, layer=_NESTED, mixes=_AUX),
    Layout("eagle", {_TYPE: None}),
    # DeepSpec's and z-lab's, transformers'.
    Layout("dflash", _DSPARK, "dflash_config", mixes=_TARGET, counts="outputs", markov=True, anchored=True),
    Layout("dflash", _DFLASH, "dflash_config", mixes=_TARGET, counts="outputs", normed=True),
    Layout(
        "dflash", {"model_type": ("muse_glimmer_assistant",)},
        mixes=_TARGET, counts="outputs", normed=True, slides=True, causal=False,
    ),
    # The authors' and NeMo's; SpecForge's.
    Layout(
        "eagle", {"architectures": _EAGLE3, "draft_vocab_size": None, "eagle_config": None, _EAGLE_AUX: None},
        "eagle_config", mixes=_EAGLE_AUX, counts="either",
    ),
)  # fmt: skip
#: EAGLE-1, EAGLE-2 and HASS, a Llama configuration: recognised by the matrix that mixes feature and embedding.
EAGLE1 = Layout("eagle", {}, generation=1)

#: Marks of heads that compute something unsupported.
REFUSED: tuple[tuple[Marks, str], ...] = (
    ({"kv_lora_rank": None, "attention_mode": ("mla",)}, "multi-head latent attention (kv_lora_rank)"),
    (
        {_TYPE: ("dflash2",), **_DFLASH2, "selector_rank": None},
        "DFlash2 (convolutions, a selector of candidates)",
    ),
    ({"dspark_backbone_conv_enabled": None}, "convolutions (dspark_backbone_conv_enabled)"),
    ({"architectures": ("Gemma4DSparkModel",)}, "a DSpark head with Gemma 4's layers (Gemma4DSparkModel)"),
)
_TYPES = "a head of type {} is not supported; supported: eagle, eagle3, peagle, dflash, dspark and Medusa heads"

#: Class defaults that nested configurations leave out: by model_type.
_QWEN3 = {"vocab_size": 151_936, "intermediate_size": 22_016, "num_key_value_heads": 32, "head_dim": 128}
_DEFAULTS: dict[object, dict[str, Any]] = {"qwen3": {**_QWEN3, "max_position_embeddings": 32_768}}
#: Prefixes of tensor names, and their names here; the first match counts. ``model.`` before them is removed.
RENAMED = (
    ("midlayer.", "model.layers.0."),
    ("transformer.", "model.layers.0."),
    ("fused_layernorm.", "model.layers.0.input_layernorm."),
    ("hidden_layernorm.", "model.layers.0.input_layernorm."),
    ("fusion_fc.", "fc."),
    ("embed_layernorm.", "embedding_layernorm."),
    ("pre_lm_head_layernorm.", "model.norm."),
    ("lm_head_layernorm.", "model.norm."),
    ("encoder.fc.", "fc."),
    ("encoder.output_norm_enc.", "hidden_norm."),
    ("layers.", "model.layers."),
    ("norm.", "model.norm."),
    ("embed_tokens.", "model.embed_tokens."),
)
#: The same for Medusa's heads, as patterns: vLLM's blocks, and its output matrices, which the authors number as blocks.
MEDUSA_NAMES = (
    (r"^(medusa_heads?\.)+", ""),
    (r"^blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)$", r"\1.\2.linear.\3"),
    (r"^lm_heads\.(\d+)\.weight$", r"\1.weight"),
)
#: Unused tensors: buffers, parts of the target, estimators of acceptance (chances are calibrated online,
#: :mod:`foresay.drafters.calibration`).
IGNORED = re.compile(r"(^|\.)(rotary_emb\.inv_freq|verifier_\w+\.weight|confidence_head\.proj\.(weight|bias))$")
_LAYER = re.compile(r"^(?:model\.)*layers\.(\d+)\.")


def _short(name: str) -> str:
    while name.startswith("model."):
        name = name.removeprefix("model.")
    return next((ours + name[len(first) :] for first, ours in RENAMED if name.startswith(first)), name)


@dataclass(frozen=True, slots=True)
class Published:
    """A head's configuration. fields: its own keys; its section overrides the top level. layer: its layers' keys."""

    layout: Layout
    fields: Fields
    layer: Fields

    @classmethod
    def read(cls, directory: Path) -> Published:
        """Read the head in ``directory``. Raises ConfigError, which names the file, for unsupported heads."""
        fields = Fields.read(directory / "config.json")
        layout = _layout_of(fields) or EAGLE1
        fields = _joined(fields, layout.own)
        for marks, what in REFUSED:
            if _bears(fields, marks):
                raise fields.error(f"{what} is not supported")
        for value in (fields.get(_TYPE) if layout.layer is None else None, fields.get("projector_type")):
            if value not in (None, "dflash", "dspark"):
                raise fields.error(_TYPES.format(value))
        layer = fields if layout.layer is None else fields.section(layout.layer) or Fields({}, fields.where)
        values = {**_DEFAULTS.get(layer.get("model_type"), {}), **layer.values}
        return cls(layout, fields, Fields({**values, "num_hidden_layers": _layer_count(directory)}, layer.where))

    def features(self, default: list[int], depth: int) -> tuple[str, ...]:
        """The target's features that are read. default: the layers if none are listed. depth: the number of layers."""
        layout, ids = self.layout, self.fields.get(self.layout.mixes)
        ids = default if ids is None else ids
        if not isinstance(ids, list) or not ids or not all(type(number) is int for number in ids):
            raise self.fields.error(f"{layout.mixes} must be a list of layer numbers, got {ids!r}")
        outputs = layout.counts == "outputs" or (layout.counts == "either" and ids[0] == 1)
        if not all(0 <= number + outputs <= depth for number in ids):
            raise self.fields.error(
                f"{layout.mixes} is {ids}, but the target has {depth} layers: the head was made for another model"
            )
        final = depth - 1 if layout.normed else None
        return tuple("final" if number == final else f"layer.{number + outputs}" for number in ids)


def kind_of(directory: Path) -> Kind | None:
    """The kind of head in ``directory``; None for a model or anything unknown."""
    fields = Fields.read(directory / "config.json")
    if any(directory.glob("medusa_lm_head.*")):
        return "medusa"
    if layout := _layout_of(fields):
        return layout.kind
    names = header_names(directory)
    # A pickle is not opened for this: models are not read from pickles, so one layer is enough evidence.
    return "eagle" if ("fc.weight" in names if names else fields.get("num_hidden_layers") == 1) else None


def _layout_of(fields: Fields) -> Layout | None:
    return next((one for one in LAYOUTS if _bears(_joined(fields, one.own), one.marks)), None)


def _bears(fields: Fields, marks: Marks) -> bool:
    for key, values in marks.items():
        found = fields.get(key)
        found = found[0] if isinstance(found, list) and len(found) == 1 else found
        if found in values if values is not None else found not in (None, False):
            return True
    return False


def _joined(fields: Fields, section: str | None) -> Fields:
    """A section's keys, which override the top level."""
    own = fields.get(section) if section else None
    inside = {key: value for key, value in own.items() if value is not None} if isinstance(own, dict) else {}
    return Fields({**fields.values, **inside}, fields.where)


def _layer_count(directory: Path) -> int:
    """The number of layers by the tensors' names; 1 for a pickle, whose names are not read here."""
    found = (_LAYER.match(name) for name in header_names(directory))
    return max((int(match[1]) for match in found if match), default=0) + 1
