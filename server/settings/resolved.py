"""What settings stand for: the target's directory, who drafts, what the model is called. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from foresay.server.settings.config import EngineConfig, ServeConfig
from foresay.spec.errors import ConfigurationError
from foresay.spec.names import DFLASH, DRAFT_MODEL, EAGLE3, MEDUSA, NGRAM, NONE, SUFFIX
from foresay.verifier.model.hub import is_local, resolve

BUNDLED = Path(__file__).parent.parent / "bundled"
#: Drafters that come with the bundled target. The heads fit it alone.
BUNDLED_HEADS = (MEDUSA, EAGLE3, DFLASH)
BUNDLED_MODEL = f"{DRAFT_MODEL}:{BUNDLED / 'draft'}"
#: Drafters that every target has, of those that bring something beside the others: ngram finds what suffix finds too.
AUTO = (SUFFIX,)


@dataclass(frozen=True, slots=True)
class Resolved:
    """A setting that was resolved, and why."""

    value: str
    reason: str


def target_directory(config: EngineConfig) -> Path:
    """The target's local directory (downloaded first, for a hub id)."""
    return BUNDLED / "target" if config.target == "bundled" else resolve(config.target, flag="TARGET")


def check_target(config: EngineConfig) -> None:
    """Raise ModelNotFound where the target can only be a path and nothing is there: before a second of importing."""
    if is_local(config.target) and not Path(config.target).expanduser().exists():
        target_directory(config)


def choose_draft(config: EngineConfig) -> Resolved:
    """Who drafts, in one word or several with commas between them.

    Raises ConfigurationError for a bundled head (``medusa``, ``eagle3``, ``dflash``) with another target.
    """
    if config.draft == "auto":
        if config.target == "bundled":
            return Resolved(
                ",".join((BUNDLED_MODEL, *AUTO)),
                "the model that comes with the bundled target, and earlier text",
            )
        return Resolved(
            ",".join(AUTO), "need no model; name a smaller model of the same family with --draft to gain more"
        )
    parts = [_found_draft(config, part) for part in named_in(config.draft)]
    bundled = len(parts) == 1 and config.draft in BUNDLED_HEADS
    return Resolved(",".join(parts), "comes with the bundled target" if bundled else "asked for")


def nothing_to_fetch(draft: str) -> bool:
    """Whether all drafters of a resolved ``--draft`` need no files, or lie in a directory of this machine."""
    places = [part.partition(":")[2] or part for part in draft.split(",") if part not in (NONE, NGRAM, SUFFIX)]
    return all(Path(place).exists() for place in places)


def _found_draft(config: EngineConfig, part: str) -> str:
    """What one name stands for."""
    if part not in BUNDLED_HEADS:
        return BUNDLED_MODEL if part in ("bundled", DRAFT_MODEL) else part
    if config.target != "bundled":
        raise ConfigurationError(
            f"--draft {part}: the bundled head fits the bundled target alone; name the folder of one that "
            f"was trained for {config.target} (--draft {part}:PATH), or make one with foresay train"
        )
    return f"{part}:{BUNDLED / part}"


def named_in(draft: str) -> tuple[str, ...]:
    """The drafters that a setting names, in order. Raises ConfigurationError for one that is named twice."""
    parts = tuple(part.strip() for part in draft.split(","))
    if len(set(parts)) < len(parts) or not all(parts) or (NONE in parts and len(parts) > 1):
        raise ConfigurationError(
            f"--draft {draft}: name each drafter once, with a comma between two, such as ngram,suffix"
        )
    return parts


def short_name(name: str) -> str:
    """A model's name for people: ``bundled/draft`` instead of where the package lies."""
    path = Path(name.partition(":")[2] or name)
    return f"bundled/{path.name}" if path.is_relative_to(BUNDLED) else name


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


class Unfit(ConfigurationError):
    """fault: what is wrong. remedy: what would be right, without a full stop. The message is both."""

    def __init__(self, fault: str, remedy: str) -> None:
        super().__init__(f"{fault}: {remedy}")
        self.fault, self.remedy = fault, remedy
