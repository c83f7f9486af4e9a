"""The errors of loading a model, from its name to its weights in memory.

ModelError                     the model cannot be loaded; the message explains why to the person who named it
├── NoSuchModel                neither a model directory nor a repository that can be fetched
├── ConfigError                config.json is absent, malformed, or asks for something unsupported
│   └── UnsupportedArchitecture
└── WeightsError               a weight file or tensor is missing, unexpected, or of the wrong shape or type
"""

from __future__ import annotations

from collections.abc import Iterable

from foresay.spec.errors import ForesayError


class ModelError(ForesayError):
    """A model cannot be loaded."""


class NoSuchModel(ModelError):
    """A model's name is neither a model directory nor a repository that can be fetched."""


class ConfigError(ModelError):
    """A model's configuration is absent, malformed, or asks for something the decoder does not compute."""


class UnsupportedArchitecture(ConfigError):
    """config.json names an architecture that is not supported."""

    def __init__(self, architecture: str, supported: Iterable[str], where: str) -> None:
        super().__init__(f"{where}: architecture {architecture} is not supported; supported: {', '.join(supported)}")
        self.architecture = architecture


class WeightsError(ModelError):
    """A weight file or tensor is missing, unexpected, or of the wrong shape or type."""


def code_refused(file: str, error: Exception) -> str | None:
    """Why transformers could not load what ``file`` describes, if that needs code of the model's repository."""
    needs_code = "trust_remote_code" in str(error)
    return f"{file} asks by its auto_map for code that comes with the model, which is never run" if needs_code else None
