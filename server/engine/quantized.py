"""``--quantize`` and ``--draft-quantize``: a model of floats that becomes one of few bits as it is loaded."""

from __future__ import annotations

from dataclasses import replace

from server.settings.unfit import Unfit
from verifier.model.config import ModelConfig
from verifier.model.quantization import Quantization


def quantized(model: ModelConfig, how: str | None, flag: str) -> ModelConfig:
    """The model as it is to be loaded. how: the setting's value. Raises Unfit for one that is quantised already."""
    if how is None:
        return model
    if model.quantization is not None:
        found = f"its weights are quantised already ({model.quantization})"
        raise Unfit(f"{flag} {how}: {found}", f"leave {flag} out, or name the model that it was made from")
    return replace(model, quantization=Quantization.made(how))
