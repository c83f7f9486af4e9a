"""What Ollama's API says about the models served here: only what is true of them."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from server.api.ollama.schemas import ModelDetails, OllamaModel
from server.settings.amounts import count_in_words
from server.settings.durations import moment
from server.settings.names import tagged
from spec.request import EngineInfo

#: Ollama's words for how weights are stored.
_STORED = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_UNKNOWN = "foresay"


def described(name: str, created: int, info: EngineInfo | None) -> OllamaModel:
    """A model under one of its names. info: None before it was loaded."""
    return OllamaModel(
        name=tagged(name),
        model=tagged(name),
        modified_at=moment(created),
        size=0 if info is None else info.weight_bytes,
        digest=hashlib.sha256(msgspec.json.encode(name if info is None else info)).hexdigest(),
        details=details(info),
    )


def details(info: EngineInfo | None) -> ModelDetails:
    """What kind of model it is, as far as that is known."""
    family = architecture(info)
    if info is None:
        return ModelDetails(family=family, families=(family,), parameter_size="", quantization_level="")
    return ModelDetails(
        family=family,
        families=(family,),
        parameter_size=count_in_words(info.parameters) if info.parameters else "",
        quantization_level=info.quantization.partition(" ")[0] or _STORED.get(info.dtype, info.dtype),
    )


def model_info(name: str, target: str, info: EngineInfo | None, longest: int | None) -> dict[str, Any]:
    """Facts by GGUF's names, which begin with the architecture, and some of ours. longest: the longest text."""
    family = architecture(info)
    facts: dict[str, Any] = {"general.architecture": family, "general.basename": name}
    if longest is not None:
        facts |= {f"{family}.context_length": longest, "foresay.context_length": longest}
    facts["foresay.target"] = target
    if info is not None:
        facts |= {
            "general.parameter_count": info.parameters,
            f"{family}.vocab_size": info.vocab_size,
            "foresay.drafter": info.drafter,
        }
    return facts


def architecture(info: EngineInfo | None) -> str:
    """The architecture as GGUF calls it: ``llama`` for ``LlamaForCausalLM``."""
    known = "" if info is None else info.architecture.removesuffix("ForCausalLM").lower()
    return known or _UNKNOWN
