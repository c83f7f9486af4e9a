"""What Ollama's API says about the model served here: only what is true of it."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from server.answers.ollama import moment
from server.names import LATEST
from server.wire.ollama import ModelDetails, OllamaModel
from spec.request import EngineInfo

#: Ollama's words for how weights are stored.
_STORED = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_UNKNOWN = "foresay"


def described(name: str, created: int, info: EngineInfo) -> OllamaModel:
    """The model under one of its names."""
    tagged = name.removesuffix(LATEST) + LATEST
    return OllamaModel(
        name=tagged,
        model=tagged,
        modified_at=moment(created),
        size=info.weight_bytes,
        digest=hashlib.sha256(msgspec.json.encode(info)).hexdigest(),
        details=details(info),
    )


def details(info: EngineInfo) -> ModelDetails:
    """What kind of model it is."""
    family = architecture(info)
    return ModelDetails(
        family=family,
        families=(family,),
        parameter_size=_counted(info.parameters),
        quantization_level=_STORED.get(info.dtype, info.dtype),
    )


def model_info(name: str, info: EngineInfo) -> dict[str, Any]:
    """Facts by GGUF's names, which begin with the architecture, and some of ours."""
    family = architecture(info)
    return {
        "general.architecture": family,
        "general.basename": name,
        "general.parameter_count": info.parameters,
        f"{family}.context_length": info.max_model_len,
        f"{family}.vocab_size": info.vocab_size,
        "foresay.context_length": info.max_model_len,
        "foresay.target": info.target,
        "foresay.drafter": info.drafter,
    }


def architecture(info: EngineInfo) -> str:
    """The architecture as GGUF calls it: ``llama`` for ``LlamaForCausalLM``."""
    return info.architecture.removesuffix("ForCausalLM").lower() or _UNKNOWN


def _counted(parameters: int) -> str:
    """A number of weights as Ollama writes it: 134.5M, 8.2B."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if parameters >= size:
            return f"{parameters / size:.1f}{letter}"
    return str(parameters) if parameters else ""
