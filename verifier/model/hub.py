"""A model's name turned into a directory here: a local one as it is, a hub repository by download or from the cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from verifier.model.errors import ModelNotFound

#: What the file is called in a directory that was made of it.
LINK = "model.gguf"
#: A model's tokenizer and its habits, which every model of the same vocabulary may share.
BESIDE = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "*.jinja",
    "chat_template.json",
]
# "model*" leaves out the second copy of all weights that some repositories carry as consolidated.safetensors.
PATTERNS = ["config.json", "model*.safetensors", "model.safetensors.index.json", *BESIDE]

_OFFLINE = "download it where there is a connection, copy the directory here and name that"
_GGUF = "is a repository of GGUF files, which are not fetched: download one of them, and name that file"


def resolve(
    name_or_path: str | Path, revision: str | None = None, extra: Sequence[str] = (), flag: str = "model"
) -> Path:
    """The directory that holds the model ``name_or_path``: itself, or the cached snapshot of the hub repository; of a
    GGUF file, what was made of it.

    revision: branch, tag or commit of a hub repository; without it the main branch. extra: patterns of files to fetch
    besides those of a model. flag: how messages call what named it.
    Raises ModelNotFound, which says what was tried and what to do.
    """
    path = Path(name_or_path).expanduser()
    try:
        there = _is_there(path)
        if there and path.is_dir():
            return _with_config(path, "a model directory holds config.json, the tokenizer and *.safetensors")
        if there and _is_gguf(path):
            return _unpacked(path)
        if there:
            raise ModelNotFound("is a file; name the directory that holds it")
        if _is_local(name_or_path):
            raise ModelNotFound("no such directory")
        directory = _snapshot(str(name_or_path), revision, extra)
        return _with_config(directory, "is it a model that transformers can load?", str(name_or_path))
    except ModelNotFound as error:
        wanted = f"{name_or_path} (revision {revision})" if revision else str(name_or_path)
        joined = " " if str(error).startswith(("is ", "has ")) else ": "
        raise ModelNotFound(f"{flag} {wanted}{joined}{error}") from error.__cause__


def _is_gguf(file: Path) -> bool:
    """llama.cpp's format, by its name or its first four bytes."""
    if file.suffix == ".gguf" or not file.is_file():  # what is no plain file may have no end
        return file.suffix == ".gguf"
    try:
        with file.open("rb") as opened:
            return opened.read(4) == b"GGUF"
    except OSError:
        return False


def cached(name: str) -> Path | None:
    """The directory of a model that is here with all of its weights, without asking the hub; None if it is not."""
    path = Path(name).expanduser()
    if _is_there(path) and _is_gguf(path):
        return path
    if _is_there(path) or _is_local(name):
        directory: Path | None = path
    else:
        directory = _cached_snapshot(name)
    return directory if directory is not None and _is_whole(directory) else None


def _cached_snapshot(repository: str) -> Path | None:
    """Where the hub's client keeps the repository, or a part of it."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(repository, "config.json")
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def _is_whole(directory: Path) -> bool:
    """Whether configuration and weights are there: a download that broke off lacks some of its files."""
    if not (directory / "config.json").is_file():
        return False
    if (index := directory / "model.safetensors.index.json").is_file():
        try:
            named = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
            return all((directory / str(file)).is_file() for file in named)
        except (ValueError, KeyError, TypeError, AttributeError, OSError):
            return False
    return any(directory.glob("*.safetensors")) or any(directory.glob("*.bin")) or any(directory.glob("*.pt"))


def _is_there(path: Path) -> bool:
    """Whether there is anything; what no file can be called is not there."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _is_local(name: str | Path) -> bool:
    """Whether the name can only mean a path: a hub id is NAME or OWNER/NAME."""
    return isinstance(name, Path) or name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name


def _with_config(directory: Path, advice: str, repository: str = "") -> Path:
    configured = (directory / "config.json").is_file()
    files = [] if any(directory.glob("*.safetensors")) else sorted(directory.glob("*.gguf"))
    if not repository and len(files) == 1:
        made = configured and files[0].is_symlink() and files[0].name == LINK
        return directory if made else _unpacked(files[0])
    if not repository and files:
        raise ModelNotFound(f"holds several GGUF files ({', '.join(each.name for each in files)}): name one of them")
    if files or (not configured and "gguf" in repository.lower()):
        raise ModelNotFound(_GGUF)
    if not configured:
        raise ModelNotFound(f"has no config.json; {advice}")
    return directory


def _unpacked(file: Path) -> Path:
    """The directory made of a GGUF file."""
    from verifier.model.gguf.directory import directory_of

    return directory_of(file)


def _snapshot(repository: str, revision: str | None, extra: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=[*PATTERNS, *extra]))
    except HFValidationError as error:
        raise ModelNotFound("is neither a directory nor a hub repository (OWNER/NAME)") from error
    except Exception as error:  # the hub's client raises its own, its HTTP library's and the system's errors
        raise ModelNotFound(f"is no directory here, and {_reason(repository, error)}") from error


def _reason(repository: str, error: Exception) -> str:
    """Why the hub did not give the repository, and what to do about it."""
    from huggingface_hub import constants, errors

    address, cache = f"{constants.ENDPOINT}/{repository}", constants.HF_HUB_CACHE
    # From the most special to the most general: a gated repository is also one not found.
    match error:
        case errors.GatedRepoError():
            return (
                f"the hub repository is gated: accept its terms at {address}, then log in (hf auth login, or HF_TOKEN)"
            )
        case errors.RevisionNotFoundError():
            return f"the hub repository has no such revision; see {address}/tree/main"
        case errors.RepositoryNotFoundError():
            return f"the hub has no such repository ({address}), or it is private: check the name or log in"
        case errors.LocalEntryNotFoundError() if constants.HF_HUB_OFFLINE:
            return f"HF_HUB_OFFLINE is set while {cache} does not hold all of it; {_OFFLINE}"
        case errors.LocalEntryNotFoundError():
            answered = isinstance(error.__cause__, errors.HfHubHTTPError)
            trouble = "answered with an error" if answered else "cannot be reached"
            remedy = "try again" if answered else "check the connection"
            return f"the hub at {constants.ENDPOINT} {trouble} ({_cause(error)}): {remedy}, or {_OFFLINE}"
    return f"the download from the hub failed ({_cause(error)}); try again, or {_OFFLINE}"


def _cause(error: BaseException) -> str:
    cause = error.__cause__ or error
    return " ".join(str(cause).split()) or type(cause).__name__
