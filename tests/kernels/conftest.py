from __future__ import annotations

import pytest

from foresay.verifier.ops.kernels.cpu import kernel_cache
from foresay.verifier.ops.kernels.cpu.jit import Processor
from tests.verifier.conftest import PROCESSORS, lesser


@pytest.fixture(autouse=True)
def _patched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are written: some by tests, and some by what tests have patched."""
    monkeypatch.setattr(kernel_cache, "unpatched", False)


@pytest.fixture(params=[*PROCESSORS, "plain"])
def any_processor(request, monkeypatch) -> Processor:
    """Kernels of a CPU are compiled for this one."""
    made = lesser(request.param)
    monkeypatch.setattr(Processor, "here", classmethod(lambda cls: made))
    return made
