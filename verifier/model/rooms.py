"""Room for the weights of a model, before a number of them is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.errors import ConfigError
from foresay.verifier.model.linear import Matrix
from foresay.verifier.model.quantization import GGUF, MADE, Scheme
from foresay.verifier.ops.quantized import QuantizedMatrix


@dataclass(frozen=True, slots=True)
class Rooms:
    """Makes uninitialised tensors. matrices: the dtype of those that are floats."""

    config: ModelConfig
    dtype: torch.dtype
    matrices: torch.dtype
    device: torch.device

    def vector(self, size: int) -> Tensor:
        """One of floats."""
        return torch.empty(size, dtype=self.dtype, device=self.device)

    def wide(self, size: int) -> Tensor:
        """One of fp32, whatever is computed in."""
        return torch.empty(size, dtype=torch.float32, device=self.device)

    def matrix(self, outer: int, inner: int, *modules: str) -> Matrix:
        """The matrix of these modules, one below the other: of floats, or of few bits."""
        scheme = self.scheme(modules, inner)
        if scheme is None:
            return torch.empty(outer, inner, dtype=self.matrices, device=self.device)
        scales = {MADE: torch.bfloat16, GGUF: torch.float16}.get(scheme.layout, torch.float32)
        group = scheme.group or inner
        kind = scheme.bits, group, scheme.symmetric, scales, self.device, scheme.floats
        empty = QuantizedMatrix.empty(outer, inner, *kind)
        if scheme.span is not None:
            return empty.with_steps(scheme.span, scheme.minimums)
        return empty.with_order() if scheme.ordered else empty

    def scheme(self, modules: Sequence[str], inner: int) -> Scheme | None:
        """How these modules are quantised. Raises ConfigError if they differ: they are multiplied as one."""
        if self.config.quantization is None:
            return None
        found = {module: self.config.quantization.scheme(module, inner) for module in modules}
        if len(set(found.values())) > 1:
            raise ConfigError(
                "modules that are multiplied as one must be quantised alike, not "
                + ", ".join(f"{module}: {scheme or 'floats'}" for module, scheme in found.items())
            )
        return found[modules[0]]
