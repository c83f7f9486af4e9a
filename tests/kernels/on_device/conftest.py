"""Where the kernels of these tests run: on a GPU, or in Triton's interpreter on the CPU."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# The interpreter keeps bf16 as raw integers, and truncates where a GPU rounds. A GPU serves nothing in fp32: nothing is
# compiled for that.
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]


if INTERPRETED:
    from triton import language
    from triton.runtime import interpreter

    # Triton puts the interpreter's words in place anew for each function that a kernel calls, which takes half of the
    # time. Nothing is compiled in this process: here they stay.
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()

    def _dot(_: Any, a: Any, b: Any, d: Any, *more: Any) -> Any:
        """What tensor cores promise, and a BLAS does not on every CPU: that a row is summed up in one order, wherever
        in its block it stands."""
        product = np.einsum("mk,kn->mn", a.data.astype(d.data.dtype), b.data.astype(d.data.dtype))
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = _dot


@pytest.fixture
def device() -> torch.device:
    if INTERPRETED:
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda")
    pytest.skip("needs a CUDA device; tests/kernels/test_interpreter.py runs this in Triton's interpreter")


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """The dtypes of activations."""
    kind: torch.dtype = request.param
    return kind
