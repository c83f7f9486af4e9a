"""Resolved settings: the target's directory, the drafters, the model's names. Does not import torch."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from foresay.server.catalog import catalog
from foresay.server.catalog.catalog import fetched, of_files, of_short_name, on_disk
from foresay.server.catalog.hub import cached, is_local, resolve
from foresay.server.settings.config import EngineConfig, ServeConfig
from foresay.spec.errors import ConfigurationError
from foresay.spec.names import (
    DFLASH,
    DRAFT_MODEL,
    DSPARK,
    EAGLE,
    EAGLE3,
    MEDUSA,
    MTP,
    NGRAM,
    NONE,
    PEAGLE,
    SELF,
    SUFFIX,
)
from foresay.verifier.model.config import ModelConfig, parameters
from foresay.verifier.model.errors import ModelError, NoSuchModel
from foresay.verifier.model.fields import Fields
from foresay.verifier.model.mtp_layout import ASSISTANTS, mtp_layout

BUNDLED = Path(__file__).parent.parent / "bundled"
#: Heads that come with the bundled target, and fit only it.
BUNDLED_HEADS = (MEDUSA, EAGLE3, DFLASH)
#: Of the heads that ship with a target, the first of these drafts by default.
FIRST_HEADS = (EAGLE3, DFLASH)
#: Kinds of heads, each to be named with its folder if none ships with the target.
_HEADS = (*BUNDLED_HEADS, EAGLE, PEAGLE, DSPARK)
BUNDLED_MODEL = f"{DRAFT_MODEL}:{BUNDLED / 'draft'}"
#: Drafters that ``auto`` adds for every target: not ngram, since suffix finds what it finds.
AUTO = (SUFFIX,)


#: What drafts for a target that the catalog does not have.
_SMALLER = "give a smaller model of the same family: --draft"
#: Weights of a target that ``auto`` lets draft for itself: a smaller one's steps are mostly overhead, and making a
#: larger one's copy takes minutes and gigabytes, so it must be requested.
_LEAST, _MOST = 50_000_000, 4_000_000_000


@dataclass(frozen=True, slots=True)
class Resolved:
    """A resolved setting, and the reason."""

    value: str
    reason: str


def target_directory(config: EngineConfig, flag: str = "TARGET") -> Path:
    """The target's local directory, downloaded first for a hub id or a short name of the catalog."""
    if config.target == "bundled":
        return BUNDLED / "target"
    known = of_short_name(config.target)
    return resolve(config.target if known is None else fetched(known, flag), flag=flag)


def cached_target(config: EngineConfig) -> Path | None:
    """The target's directory or file if all of it is on disk, without network access."""
    if config.target == "bundled":
        return BUNDLED / "target"
    known = of_short_name(config.target)
    return cached(config.target) if known is None else on_disk(known)


def check_names(config: EngineConfig) -> None:
    """Check names before the slow imports: fetch a target of the catalog, and raise NoSuchModel if it cannot be had
    or a path does not exist."""
    for part in () if config.draft == "auto" else (one for each in named_in(config.draft) for one in stages(each)):
        source = part.partition(":")[2] or part
        if is_local(source) and not Path(source).expanduser().exists():
            resolve(source, flag="--draft")
    if config.target == "bundled":
        return
    missing = is_local(config.target) and not Path(config.target).expanduser().exists()
    if missing or of_short_name(config.target) is not None:
        target_directory(config)


class CannotRun(ConfigurationError):
    """A setting that cannot work. fault: what is wrong. hint: how to fix it, without a full stop. The message is
    both."""

    def __init__(self, fault: str, hint: str) -> None:
        super().__init__(f"{fault}: {hint}")
        self.fault, self.hint = fault, hint


#: A prompt and an answer of one token each.
LEAST_TOKENS = 2


def max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """The longest text, prompt and output together; raises CannotRun if more is requested than the target supports."""
    wanted = config.max_model_len or model.max_positions
    if wanted > model.max_positions:
        raise CannotRun(
            f"--max-model-len {wanted}: the model holds at most {model.max_positions} tokens",
            f"--max-model-len {model.max_positions} is the most",
        )
    if config.max_model_len is None and config.kv_tokens is not None:
        wanted = min(wanted, config.kv_tokens)
    if wanted < LEAST_TOKENS:
        raise CannotRun(
            f"a context of {wanted} tokens cannot hold a prompt and an answer",
            f"--max-model-len and --kv-tokens must be at least {LEAST_TOKENS}, and so must what the model holds",
        )
    return wanted


def check_config(config: EngineConfig) -> ModelConfig | None:
    """The configuration of a target on disk, before the slow imports; None for one that has yet to be fetched. Raises a
    loader's error for one that cannot be loaded, CannotRun for a context that it does not hold."""
    source = Path(config.target).expanduser()
    if not source.exists() and cached_target(config) is None:
        return None
    model = ModelConfig.from_directory(target_directory(config))
    max_model_len(config, model)
    return model


def choose_draft(config: EngineConfig) -> Resolved:
    """The drafters, as one word or several separated by commas.

    Raises ConfigurationError for a head given only by its kind (``medusa``, ``eagle3``, ``dflash``) if none of that
    kind comes with the target.
    """
    if config.draft == "auto":
        return _chosen_draft(config)
    parts = [_found_draft(config, part) for part in named_in(config.draft)]
    comes = len(parts) == 1 and config.draft in BUNDLED_HEADS
    return Resolved(",".join(parts), f"comes with {_the_target(config)}" if comes else "asked for")


def _chosen_draft(config: EngineConfig) -> Resolved:
    if config.target == "bundled":
        return Resolved(
            ",".join((BUNDLED_MODEL, *AUTO)), "the model that comes with the bundled target, and earlier text"
        )
    directory, model = _on_disk(config)
    if directory is not None and model is not None:
        if _predicts(directory, model):
            return Resolved(",".join((MTP, *AUTO)), "the checkpoint's own layer for further tokens, and earlier text")
        if (assistant := _assistant(config, model)) is not None:
            return Resolved(",".join((f"{MTP}:{assistant}", *AUTO)), "the target's assistant, and earlier text")
    may_draft = model is not None and not config.quantize and _may_draft(model)
    heads = _heads(config)
    kind = next((kind for kind in FIRST_HEADS if kind in heads), None)
    if kind is not None and may_draft:
        head = f"{kind}:{heads[kind]}"
        reason = "the head that ships with it, alone or before the target itself in fewer bits, and earlier text"
        return Resolved(",".join((head, f"{head} > {SELF}", *AUTO)), reason)
    if kind is not None:
        return Resolved(",".join((f"{kind}:{heads[kind]}", *AUTO)), "the head that ships with it, and earlier text")
    if may_draft:
        return Resolved(",".join((SELF, *AUTO)), "the target itself in fewer bits, and earlier text")
    known = catalog.find_target(config.target)
    more = f"--draft {known.drafts[0].setting}" if known and known.drafts else _SMALLER
    return Resolved(",".join(AUTO), f"copied from earlier text; to gain more, {more}")


def _on_disk(config: EngineConfig) -> tuple[Path | None, ModelConfig | None]:
    """The target's directory and configuration, if it is on disk; None if it cannot be read, which loading it
    reports."""
    with suppress(ModelError):
        if (source := cached_target(config)) is not None:
            directory = resolve(source)
            return directory, ModelConfig.from_directory(directory)
    return None, None


def _predicts(directory: Path, model: ModelConfig) -> bool:
    """Whether a checkpoint has a layer for further tokens with a known layout."""
    from foresay.verifier.model.checkpoint import header_names  # imports numpy

    with suppress(ModelError):
        return bool(names := header_names(directory)) and mtp_layout(names, model) is not None
    return False


def _assistant(config: EngineConfig, model: ModelConfig) -> str | None:
    """The directory or hub id of what was published to draft for the target, if that is on disk and fits: its name with
    ``-assistant`` behind it."""
    name = f"{config.target.rstrip('/')}-assistant"
    with suppress(ModelError):  # naming it reports the error
        directory = cached(name)
        if directory is None or Fields.read(directory / "config.json").get("model_type") not in ASSISTANTS:
            return None
        from foresay.verifier.heads.assistant import AssistantConfig  # imports torch

        AssistantConfig.read(directory, model)
        return name
    return None


def _may_draft(model: ModelConfig) -> bool:
    """Whether a target is worth a copy in fewer bits."""
    return model.quantization is None and _LEAST <= parameters(model) <= _MOST


def _heads(config: EngineConfig) -> dict[str, Path]:
    """The folders of the heads that ship with Foresay for the target, by kind; empty for a target not on disk."""
    folder = BUNDLED
    if config.target != "bundled":
        try:
            source = cached_target(config)
            known = None if source is None else of_files(resolve(source))
        except NoSuchModel:
            known = None
        if known is None:
            return {}
        folder = BUNDLED / known.short
    return heads_in(folder)


def heads_in(folder: Path) -> dict[str, Path]:
    """The folders of the heads in a folder of those that ship with Foresay, by kind."""
    return {kind: folder / kind for kind in BUNDLED_HEADS if (folder / kind / "config.json").is_file()}


def _the_target(config: EngineConfig) -> str:
    return "the bundled target" if config.target == "bundled" else config.target


def nothing_to_fetch(draft: str) -> bool:
    """Whether all drafters of a resolved ``--draft`` need no files, or are in local directories."""
    named = (stage.partition(":") for part in draft.split(",") for stage in stages(part))
    fileless = (NONE, NGRAM, SUFFIX, SELF)
    sources = [source or word for word, _, source in named if word not in fileless and (word != MTP or source)]
    return all(Path(source).exists() for source in sources)


def _found_draft(config: EngineConfig, part: str) -> str:
    """One name, resolved."""
    if len(chain := stages(part)) > 1:
        return " > ".join(_found_draft(config, stage) for stage in chain)
    if part not in _HEADS:
        return BUNDLED_MODEL if part in ("bundled", DRAFT_MODEL) else part
    head = _heads(config).get(part)
    if head is None:
        raise ConfigurationError(
            f"--draft {part}: no such head comes with {_the_target(config)}; name the folder of one that was trained "
            f"for it (--draft {part}:PATH), or make one with foresay train"
        )
    return f"{part}:{head}"


def named_in(draft: str) -> tuple[str, ...]:
    """The drafters that a setting names, in order. Raises ConfigurationError if one is named twice."""
    parts = tuple(part.strip() for part in draft.split(","))
    if len(set(parts)) < len(parts) or not all(parts) or (NONE in parts and len(parts) > 1):
        raise ConfigurationError(
            f"--draft {draft}: name each drafter once, with a comma between two, such as ngram,suffix"
        )
    return parts


def stages(part: str) -> tuple[str, ...]:
    """The drafters of a chain ``a > b``, in which each drafts for the next; otherwise a single one. Raises
    ConfigurationError for a chain with a stage that is no drafter."""
    chain = tuple(stage.strip() for stage in part.split(">"))
    if len(chain) > 1 and not {"", NONE, "auto"}.isdisjoint(chain):
        raise ConfigurationError(f"--draft {part}: expected a drafter on each side of >, such as suffix > self")
    return chain


def short_name(name: str) -> str:
    """A model's name for people: ``bundled/draft`` instead of a path into the package."""
    path = Path(name.partition(":")[2] or name)
    return f"bundled/{path.relative_to(BUNDLED)}" if path.is_relative_to(BUNDLED) else name


#: The tag that Ollama's clients append to a name without one.
LATEST = ":latest"


def tagged(name: str) -> str:
    """A name as Ollama's clients see it: with a tag."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def model_names(config: ServeConfig) -> tuple[str, ...]:
    """The target's names for clients: from the settings, else the last part of its directory or GGUF file."""
    return config.served_model_name or (_own_name(config.target),)


def _own_name(target: str) -> str:
    path = Path(target).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return path.stem
    if target == "bundled" or not path.is_dir():
        return target
    return path.resolve().name or target
