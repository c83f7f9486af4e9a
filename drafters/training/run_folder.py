"""The folder of an unfinished run, from which the same command continues.

::

    OUT.work/settings.json     the run's settings, and the version of this format; other settings are refused
    OUT.work/text-0000.pt ...  the target's texts, batch by batch
    OUT.work/states-0000.pt .. its states of them, if they are kept
    OUT.work/state.pt          weights, optimizer and step, saved from time to time
    OUT.work/lock              held by the process that runs
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from foresay.drafters.training import files
from foresay.drafters.training.settings import Settings
from foresay.spec.errors import ConfigurationError, ForesayError

#: Incremented whenever the folder's contents, or how a run uses them, change.
FORMAT = 6


class RunFolder:
    """The folder next to ``out``, claimed for the run with these settings.

    Raises ConfigurationError if ``out`` cannot become a model, or the folder belongs to another run.
    """

    def __init__(self, out: Path, settings: Settings) -> None:
        self.out = Path(os.path.abspath(out))
        self.path = self.out.parent / (self.out.name + ".work")
        self._settings = self.path / "settings.json"
        self.state = self.path / "state.pt"
        self._check_out()
        self._lock: int | None = self._locked()
        try:
            self._claim(json.loads(json.dumps(asdict(settings))))
        except ForesayError:
            self._unlock()
            raise

    def text(self, number: int) -> Path:
        """The file of one batch of texts."""
        return self.path / f"text-{number:04d}.pt"

    def states(self, number: int) -> Path:
        """The file of the target's states of some texts."""
        return self.path / f"states-{number:04d}.pt"

    def _check_out(self) -> None:
        """Check that the model can be written there in the end, as far as can be known now."""
        if not self.out.name:
            raise ConfigurationError(f"--out {self.out}: name a folder of its own")
        if self.out.exists() and not self.out.is_dir():
            raise ConfigurationError(f"--out {self.out}: is a file; name a folder that is not there yet")
        begun = self._settings.exists()
        if (self.out / "config.json").exists() and not begun:
            self._sweep()
            raise ConfigurationError(f"--out {self.out}: holds a model already; name another folder")
        if self.out.is_dir() and any(self.out.iterdir()) and not begun:
            raise ConfigurationError(f"--out {self.out}: is not empty; name another folder")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"--out {self.out}: {self.path} cannot be made ({error.strerror})") from error
        if not os.access(self.out if self.out.exists() else self.out.parent, os.W_OK):
            raise ConfigurationError(f"--out {self.out}: nothing can be written there (Permission denied)")

    def _locked(self) -> int:
        """A descriptor of the lock, which the system releases however the process ends."""
        try:
            lock = os.open(self.path / "lock", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigurationError(f"--out {self.out}: {self.path} cannot be written ({error.strerror})") from error
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            os.close(lock)
            raise ConfigurationError(
                f"--out {self.out}: another process is training it; wait until it ends, or name another folder"
            ) from error
        except OSError:
            pass  # some network file systems have no locks
        return lock

    def _claim(self, ours: dict[str, Any]) -> None:
        """Claim the folder, or check that it belongs to this run."""
        if self._settings.exists() and self.has_progress:
            self._check_same(ours)
            return
        for left in self._made():  # by a finished run, which was removed in part
            left.unlink(missing_ok=True)
        files.write(self._settings, files.text({"format": FORMAT, **ours}))

    @property
    def has_progress(self) -> bool:
        """Whether there is anything that would have to be computed again."""
        return any(True for _ in self._made())

    def _made(self) -> Iterator[Path]:
        yield from self.path.glob("text-*.pt")
        yield from self.path.glob("states-*.pt")
        yield from self.path.glob(self.state.name)

    def _check_same(self, ours: dict[str, Any]) -> None:
        theirs = self._read()
        made = theirs.pop("format", 1)
        if made != FORMAT or set(theirs) != set(ours):
            raise ConfigurationError(
                f"{self.path}: holds a run of another version of Foresay (format {made}, this one makes {FORMAT}); "
                "remove it, or name another --out"
            )
        other = next((key for key in ours if theirs[key] != ours[key]), None)
        if other is not None:
            raise ConfigurationError(
                f"{self.path}: belongs to a run with {other} {theirs[other]} instead of {ours[other]}; "
                "give the same settings to go on with it, or remove it"
            )

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(self._settings.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{self._settings}: is damaged; remove {self.path} to start again") from error
        if not isinstance(found, dict):
            raise ConfigurationError(f"{self._settings}: is damaged; remove {self.path} to start again")
        return found

    def close(self) -> None:
        """Release the folder; it is removed if nothing was computed yet."""
        if self._lock is not None and not self.has_progress:
            self._sweep()
        self._unlock()

    def remove(self) -> None:
        """The run has finished: remove the folder. The settings go first, since without them the other files do not
        count."""
        self._sweep()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None

    def _sweep(self) -> None:
        with suppress(OSError):
            for file in (self._settings, *self._made(), *self.path.glob("*.partial"), self.path / "lock"):
                file.unlink(missing_ok=True)
            self.path.rmdir()
