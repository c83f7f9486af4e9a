"""Portable bits (docs/same-tokens.md#portable-bits): a model's logits, and the tokens sampled of them, are the same on
every processor. `portable.json` has their digests, compared on whatever machine this runs, and with kernels written for
other processors. Nothing on the way is left to a function whose last digit a library or a processor decides.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from foresay.server.engine.build import build_engine
from foresay.server.settings.config import EngineConfig
from foresay.spec.request import Request
from foresay.spec.sampling import SamplingParams
from foresay.verifier.ops.kernels.cpu.jit import Processor
from foresay.verifier.ops.records import RowSampling
from foresay.verifier.ops.sample import sample_rows
from tests.kernels.emulated import HERE, emulation_of
from tests.verifier.families import make
from tests.verifier.reading import Reader, load_decoder

DIGESTS = Path(__file__).with_name("portable.json")
#: Kinds of models: dense, with tanh and a window, recurrent in two ways, mixtures, latents, shared keys, sinks.
FAMILIES = ("llama3", "gemma2", "mistral", "qwen3_5", "nemotron_h", "qwen3_moe", "deepseek_v3", "gemma4", "gpt_oss")
FORMATS: dict[str, dict[str, Any]] = {
    "floats": {},
    "int8": {"quantize": "int8"},
    "int4, rounded": {"quantize": "int4", "rounds": True},
}
CASES = [(family, form) for family in FAMILIES for form in FORMATS if not (family == "gpt_oss" and form != "floats")]
PROCESSORS = ("haswell", "skylake-avx512", "cascadelake", "znver4", "sapphirerapids")
#: What torch computes with one result everywhere: what moves numbers, and sums, products and quotients one at a time.
EXACT = {
    "abs", "add_", "add", "alias", "amax", "arange", "argmax", "as_strided", "bitwise_and", "cat", "clamp", "clone",
    "constant_pad_nd", "contiguous", "copy_", "copy", "detach_", "detach", "div_", "div", "empty", "empty_like",
    "eq", "expand", "fill_", "flatten", "full", "full_like", "gather", "index", "index_copy_", "index_copy",
    "index_put_", "index_select", "isfinite", "lift_fresh", "logical_not", "masked_fill", "max", "maximum", "min",
    "minimum", "mul", "mul_", "neg", "neg_", "new_empty", "new_full", "new_ones", "new_zeros", "ones", "permute",
    "reciprocal", "repeat", "reshape", "resolve_conj", "resolve_neg", "round", "round_", "rsub", "select",
    "select_scatter", "slice", "sort", "split", "split_with_sizes", "sqrt", "squeeze", "stack", "sub", "sub_", "t",
    "to", "_to_copy", "topk", "transpose", "unbind", "unflatten", "unfold", "_unsafe_view", "unsqueeze", "view",
    "where", "zero_", "zeros", "zeros_like",
}  # fmt: skip


class Seen(TorchDispatchMode):
    """Counts what torch computes of floats."""

    def __init__(self) -> None:
        super().__init__()
        self.names = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        results = found if isinstance(found, (tuple, list)) else (found,)
        if any(isinstance(one, Tensor) and one.is_floating_point() for one in results):
            self.names[str(func).split(".")[1]] += 1
        return found


def draw_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights whose bits no library decides: sums of four uniform numbers."""

    plain = {"randn": torch.randn, "rand": torch.rand}
    begun: dict[torch.Generator, np.random.Generator] = {}

    def drawn(numbers: int, shape: Sequence[int], generator: torch.Generator) -> NDArray[np.float64]:
        own = begun.setdefault(generator, np.random.Generator(np.random.PCG64(generator.initial_seed())))
        made: NDArray[np.float64] = own.integers(0, 1 << 20, (numbers, *shape)).sum(0) / (1 << 20)
        return made

    def randn(*shape: Any, generator: torch.Generator | None = None, **more: Any) -> Tensor:
        if generator is None:
            return plain["randn"](*shape, **more)
        return torch.from_numpy((drawn(4, shape[0], generator) - 2) * math.sqrt(3)).float()

    def rand(*shape: Any, generator: torch.Generator | None = None, **more: Any) -> Tensor:
        if generator is None:
            return plain["rand"](*shape, **more)
        return torch.from_numpy(drawn(1, shape[0], generator)).float()

    monkeypatch.setattr(torch, "randn", randn)
    monkeypatch.setattr(torch, "rand", rand)


def digest(directory: Path, **form: Any) -> str:
    """Of the logits of a text, bit by bit, and of tokens sampled of them in several ways."""
    decoder = load_decoder(directory, probed=False, **form)
    logits = Reader(decoder).alone([(7 * at * at + 3 * at) % decoder.config.vocab_size for at in range(40)])
    ways = [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.7, 20, 0.9, 0.0), (1.3, 0, 0.8, 0.05)]
    rows = [SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m) for t, k, p, m in ways] * 10
    tokens = sample_rows(logits, RowSampling.from_params(rows, range(40), range(40)))
    return hashlib.sha256(logits.numpy().tobytes() + tokens.numpy().tobytes()).hexdigest()


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str) -> Path:
    draw_exactly(monkeypatch)
    make(family, tmp_path)
    return tmp_path


@pytest.mark.parametrize(("family", "form"), CASES)
def test_the_bits_are_those_of_every_other_machine(directory: Path, family: str, form: str) -> None:
    known = json.loads(DIGESTS.read_text())
    assert digest(directory, **FORMATS[form]) == known[f"{family}, {form}"], (
        "on this machine another text may be written"
    )


def some(every: int) -> list[Any]:
    """Each case on each processor; one in ``every`` of them is tried in each run, the others in `make soak`."""
    cases = [(*case, processor) for case in CASES for processor in PROCESSORS]
    return [pytest.param(*case, marks=() if at % every == 0 else pytest.mark.soak) for at, case in enumerate(cases)]


@pytest.mark.skipif(not HERE.is_x86, reason="kernels of x86 run on x86")
@pytest.mark.parametrize(("family", "form", "processor"), some(7))
def test_kernels_of_other_processors_have_the_same_bits(
    directory: Path, family: str, form: str, processor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = emulation_of(processor)
    monkeypatch.setattr(Processor, "here", classmethod(lambda cls: other))
    assert digest(directory, **FORMATS[form]) == json.loads(DIGESTS.read_text())[f"{family}, {form}"]


@pytest.mark.parametrize("family", FAMILIES)
def test_no_function_of_a_library_decides_a_bit(directory: Path, family: str) -> None:
    with Seen() as seen:
        engine = build_engine(
            EngineConfig(target=str(directory), draft="none", bits="portable", weight_cache=False, kv_disk="off"), None
        )
        for temperature in (0.0, 1.0):
            params = SamplingParams(temperature=temperature, top_p=0.9, repetition_penalty=1.2, seed=1, max_tokens=8)
            engine.add(Request(id=f"{temperature}", prompt=list(range(3, 40)), params=params))
            while engine.has_work:
                engine.step()
    assert engine.info.bits == "portable 1"
    assert sorted(set(seen.names) - EXACT) == []


def test_the_guard_sees_what_a_library_decides() -> None:
    with Seen() as seen:
        torch.ones(3).exp().sum()
    assert {"exp", "sum"} <= set(seen.names) - EXACT


def answers(directory: Path, draft: str, count: int) -> list[list[int]]:
    """Texts of many prompts and ways of sampling, several at a time."""
    config = EngineConfig(
        target=str(directory), draft=draft, bits="portable", weight_cache=False, kv_disk="off", threads=1
    )
    engine, random, found = build_engine(config, None), Random(5), dict[str, list[int]]()
    for number in range(count):
        params = SamplingParams(
            temperature=random.choice((0.0, 0.7, 1.0, 1.5)), top_p=random.choice((1.0, 0.9)), seed=number,
            top_k=random.choice((0, 0, 30)), repetition_penalty=random.choice((1.0, 1.3)), max_tokens=24,
        )  # fmt: skip
        prompt = [random.randrange(3, 300) for _ in range(random.randrange(1, 60))]
        engine.add(Request(id=str(number), prompt=prompt * random.choice((1, 2)), params=params))
        while engine.has_work and (number + 1 == count or len(found) + 12 < number):
            for delta in engine.step():
                found.setdefault(delta.id, []).extend(delta.tokens)
    return [found[str(number)] for number in range(count)]


@pytest.mark.soak
@pytest.mark.skipif(not HERE.is_x86, reason="kernels of x86 run on x86")
@pytest.mark.parametrize("family", FAMILIES)
def test_many_answers_are_the_same_on_two_processors(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafted here, several at once; without drafts with the kernels of a processor with half of the registers."""
    here = answers(directory, "suffix", 230)
    other = emulation_of("haswell")
    monkeypatch.setattr(Processor, "here", classmethod(lambda cls: other))
    assert answers(directory, "none", 230) == here


if __name__ == "__main__":  # writes the digests of this machine
    import tempfile

    with pytest.MonkeyPatch.context() as patched:
        draw_exactly(patched)
        found = {}
        for family, form in CASES:
            with tempfile.TemporaryDirectory() as folder:
                make(family, folder)
                found[f"{family}, {form}"] = digest(Path(folder), **FORMATS[form])
    DIGESTS.write_text(json.dumps(found, indent=1) + "\n")
