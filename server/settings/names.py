"""What clients call a model that is served."""

from __future__ import annotations

from pathlib import Path

import msgspec

from server.settings.config import ServeConfig

#: The tag that Ollama's clients put behind a name that has none.
LATEST = ":latest"


def tagged(name: str) -> str:
    """A name as Ollama's clients see it: with a tag."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


class Names(msgspec.Struct, frozen=True):
    """known: all names, the first one for answers. any: others mean the model too."""

    known: tuple[str, ...]
    any: bool = False

    def has(self, asked: str) -> bool:
        """Whether it is one of the names, with Ollama's tag or without."""
        return asked.removesuffix(LATEST) in {name.removesuffix(LATEST) for name in self.known}

    def mean(self, asked: str) -> bool:
        """Whether a request for ``asked`` is for this model."""
        return self.any or self.has(asked)


def model_names(config: ServeConfig) -> tuple[str, ...]:
    """What clients call the target, as the settings say: the last part of a directory or GGUF file, unless they name
    it."""
    return config.served_model_name or (_own_name(config.target),)


def _own_name(target: str) -> str:
    path = Path(target).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return path.stem
    if target == "bundled" or not path.is_dir():
        return target
    return path.resolve().name or target
