"""Foresay in a notebook or a script: the engine in this process, without a server.

::

    from foresay import Engine, SamplingParams

    with Engine("bundled") as engine:
        print(engine.generate("Once upon a time", SamplingParams(seed=1, max_tokens=60)).text)
        for piece in engine.stream("The little fox"):
            print(piece, end="", flush=True)

Every error is a ``ForesayError``. ``import foresay`` is cheap; torch is imported when ``Engine`` or ``SamplingParams``
is first looked up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foresay.server.engine_process.local import Engine, TextStream
    from foresay.server.engine_process.text_stream import Completion
    from foresay.spec.errors import (
        ConfigurationError,
        ContextLengthExceeded,
        ForesayError,
        InvalidRequest,
        NumericalError,
    )
    from foresay.spec.sampling import SamplingParams

__version__ = "0.1.0"
__all__ = [
    "Completion",
    "ConfigurationError",
    "ContextLengthExceeded",
    "Engine",
    "ForesayError",
    "InvalidRequest",
    "NumericalError",
    "SamplingParams",
    "TextStream",
    "__version__",
]

_HOMES = {
    "Completion": "foresay.server.engine_process.text_stream",
    "ConfigurationError": "foresay.spec.errors",
    "ContextLengthExceeded": "foresay.spec.errors",
    "Engine": "foresay.server.engine_process.local",
    "ForesayError": "foresay.spec.errors",
    "InvalidRequest": "foresay.spec.errors",
    "NumericalError": "foresay.spec.errors",
    "SamplingParams": "foresay.spec.sampling",
    "TextStream": "foresay.server.engine_process.local",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
