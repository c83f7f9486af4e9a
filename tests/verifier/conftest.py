from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from foresay.verifier.model.decoder import Decoder
from foresay.verifier.ops.kernels.cpu.jit import Processor
from tests.combinations import pairwise
from tests.kernels.emulated import emulation_of
from tests.verifier.faked_hub import cache as cache
from tests.verifier.faked_hub import hub as hub
from tests.verifier.families import make
from tests.verifier.reading import load_decoder


@dataclass(frozen=True)
class Family:
    """A random tiny model: as transformers has it, and our decoder by dtype."""

    oracle: Any
    decoder: Callable[[torch.dtype], Decoder]


PROCESSORS = ["here", "without bf16", "without VNNI", "without AVX-512"]
#: Those that this machine may not be able to run.
EMULATED = ("skylake-avx512", "cascadelake")


def by_processor(one: Sequence[Any], other: Sequence[Any]) -> list[Any]:
    """Cases of a processor and one of each: all for this processor; of the others a third, any two of them together.
    The rest is tried in `make soak`, since what takes the time is to compile them."""
    return [
        pytest.param(name, first, second, marks=() if name == "here" or (at + n - turn) % 3 == 0 else pytest.mark.soak)
        for turn, name in enumerate(PROCESSORS)
        for at, first in enumerate(one)
        for n, second in enumerate(other)
    ]


def by_pairs(names: str, *parameters: Sequence[Any]) -> pytest.MarkDecorator:
    """Cases of a processor and of these, of which any two values meet; `make soak` tries the others."""
    cases = pairwise(PROCESSORS, *parameters)
    return pytest.mark.parametrize(f"processor, {names}", cases, ids=str, indirect=["processor"])


class Narrow(Processor):
    """This one with registers of 8 numbers: what AVX-VNNI has, in the words of AVX512-VNNI, which runs here."""

    wide = False

    def key_of(self, *parts: str) -> str:
        return super().key_of("narrow", *parts)


def lesser(kind: str) -> Processor:
    """This processor, or what of it a lesser one would have; plain: what every one of its kind has. narrow: with
    registers of 8 numbers."""
    here = Processor.here()
    if kind in EMULATED:
        return emulation_of(kind)
    if kind == "plain":
        return Processor("x86-64" if here.is_x86 else "generic", "")
    if kind == "narrow":
        return Narrow(here.name, here.features)
    without = {
        "here": (),
        "without bf16": ("avx512bf16",),
        "without VNNI": ("avx512bf16", "avx512vnni", "avxvnni", "amx"),
        "without AVX-512": ("avx512", "amx", "avxvnni"),
    }[kind]
    features = [f"-{one[1:]}" if one[1:].startswith(without) and without else one for one in here.features.split(",")]
    return Processor("x86-64-v3" if kind == "without AVX-512" else here.name, ",".join(features))


@pytest.fixture(params=PROCESSORS)
def processor(request, monkeypatch) -> Processor:
    """Kernels are compiled for this one."""
    if request.param != "here" and not Processor.here().is_x86:
        pytest.skip("other processors have no such instructions to leave out")
    made = lesser(request.param)
    monkeypatch.setattr(Processor, "here", classmethod(lambda cls: made))
    return made


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    """Models by the names of ``tests.verifier.families``, each made once."""

    @functools.cache
    def made(name: str) -> Family:
        directory = tmp_path_factory.mktemp(name)
        oracle = make(name, directory)
        return Family(oracle, functools.cache(lambda dtype: load_decoder(directory, dtype)))

    return made
