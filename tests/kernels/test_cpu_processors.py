"""Every processor: kernels are compiled for a table of them, whatever machine this is, and a kernel that LLVM cannot
compile ends nothing. That they compute the same is shown where they are tested, under the features of lesser processors
(``processor`` of ``tests/verifier/conftest.py``) and emulated ones (``tests/kernels/emulated.py``).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

from foresay.server.catalog.catalog import known_targets
from foresay.server.engine.build import build_engine
from foresay.server.engine.parameters import Device, choose_activations
from foresay.server.settings.config import EngineConfig
from foresay.server.settings.resolved import CannotRun
from foresay.spec.engine import EngineCore
from foresay.spec.request import Request
from foresay.spec.sampling import SamplingParams
from foresay.verifier.model.linear import Linear
from foresay.verifier.ops.eager import Op
from foresay.verifier.ops.kernels.cpu import attention, candidates, integer_product, kernel_cache, launch, rounded
from foresay.verifier.ops.kernels.cpu.attention import Scores
from foresay.verifier.ops.kernels.cpu.compiler import CompilationFailed, Compiler, Job
from foresay.verifier.ops.kernels.cpu.jit import Processor
from foresay.verifier.ops.kernels.cpu.launch import Compiled
from foresay.verifier.ops.kernels.cpu.product import ProductShape
from foresay.verifier.ops.records import Gate
from tests.kernels.emulated import PROCESSORS, emulation_of
from tests.same_tokens.models import make_pair
from tests.same_tokens.runs import jobs_of, plain
from tests.server.known_costs import known
from tests.verifier.families import FAMILIES
from tests.verifier.quantized_weights import E2M1, KINDS, STEPPED, matrix_of

#: A kernel: the function that writes it, and its constants.
Asked = tuple[Compiled, tuple[Any, ...]]
DTYPES = (torch.float32, torch.bfloat16)
#: What takes most registers, or most text: whole numbers of 4 and 8 bits, with minimums and zeros.
HEAVY = ("q4_k", "q5_k")


@pytest.fixture
def here(request, monkeypatch) -> Processor:
    """Kernels are written for this processor of the table."""
    made = PROCESSORS[request.param]
    monkeypatch.setattr(Processor, "here", classmethod(lambda cls: made))
    return made


def noted(monkeypatch: pytest.MonkeyPatch, run: bool) -> list[Asked]:
    """The kernels that ops ask for from here on. run: whether they are compiled and run too."""
    found: dict[Asked, None] = {}
    call = Compiled.__call__

    def note(self: Compiled, *constants: Any) -> Any:
        found[self, constants] = None
        return call(self, *constants) if run else lambda *_: None

    monkeypatch.setattr(Compiled, "__call__", note)
    return found  # type: ignore[return-value]


def products(monkeypatch: pytest.MonkeyPatch, kinds: tuple[str, ...], gates: Sequence[Gate]) -> list[Asked]:
    """The kernels of products with weights of these kinds, and of floats; for this processor."""
    with monkeypatch.context() as patch:
        found = noted(patch, run=False)
        rounds = Processor.here().multiplies_bytes
        for at, kind in enumerate(kinds):
            for dtype in DTYPES:
                x, gate = torch.zeros(3, 128, dtype=dtype), gates[at % len(gates)]
                for how in {False, rounds and not kind.startswith("fp8")}:
                    Linear(matrix_of((128, 64), kind), None, dtype, gate, rounds=how).gated(x)
        for gate in gates:
            for dtype in (*DTYPES, torch.float16):
                x = torch.zeros(3, 128, dtype=dtype)
                Linear(torch.zeros(64, 128, dtype=dtype), torch.zeros(64), dtype, gate).gated(x)
    return list(found)


def of_experts(requests: list[Asked]) -> Iterator[Asked]:
    """Products, and the same with weights of experts and of heads."""
    for write, constants in requests:
        yield write, constants
        if isinstance(shape := constants[0], ProductShape):
            yield write, (replace(shape, experts=True),)
            if not shape.gated and not shape.bias:
                yield write, (replace(shape, heads=2),)


def attentions() -> set[tuple[Any, ...]]:
    """The constants of attention in the models that are known."""
    shapes = [target.shape for target in known_targets().values()]
    dims = {(one.head_dim, one.num_heads // one.num_kv_heads, one.num_kv_heads) for one in shapes}
    return {
        (dtype, stored, (dim, dim), team, groups, Scores(dim**-0.5, None, False))
        for dim, team, groups in dims
        for dtype, stored in ((torch.bfloat16,) * 2, (torch.float32,) * 2, (torch.bfloat16, torch.int8))
    }


def uncompiled(processor: Processor, requests: list[Asked]) -> list[str]:
    """Why those that cannot be compiled for it cannot. What was compiled before is not compiled again."""
    faults = []
    for write, constants in requests:
        text = write.write(*constants).text()
        key = processor.key_of("object", text)
        try:
            if kernel_cache.load(key) is None:
                kernel_cache.save(key, processor.compiled(text))
        except CompilationFailed as error:
            faults.append(f"{write.write.__qualname__}{constants}: {error}")
    return faults


#: One of each kind; the others are for `make soak`.
KINDS_OF = ("haswell", "alderlake", "cascadelake", "sapphirerapids", "neoverse-n1")
SOME = [name if name in KINDS_OF else pytest.param(name, marks=pytest.mark.soak) for name in PROCESSORS]


@pytest.mark.parametrize("here", SOME, indirect=True)
def test_the_largest_kernels_are_compiled_for_every_processor(here, monkeypatch) -> None:
    requests = [
        one for one in products(monkeypatch, HEAVY, ("silu",)) if one[1] and isinstance(one[1][0], ProductShape)
    ]
    largest = max(attentions(), key=lambda one: (one[2], one[3]))
    requests = [
        one for one in requests if one[1][0].compute in (torch.bfloat16, torch.int8) and one[1][0].out is torch.bfloat16
    ]
    requests += [(attention._attention, largest), (candidates._deciding, (candidates.PIECE, True, True))]
    assert uncompiled(here, requests) == []


@pytest.fixture(scope="module")
def of_families(tmp_path_factory) -> list[Asked]:
    """The kernels that a model of each family asks for, with its draft model, at both dtypes."""
    patch = pytest.MonkeyPatch()
    found = noted(patch, run=True)
    for family in FAMILIES:
        for dtype in DTYPES:
            pair = make_pair(family, tmp_path_factory.mktemp(family), dtype)
            plain(pair.target, jobs_of(pair.vocab_size, [5, 17], 4))
    patch.undo()
    return [one for one in found if not (one[1] and isinstance(one[1][0], ProductShape))]


@pytest.mark.soak
@pytest.mark.parametrize("here", PROCESSORS, indirect=True)
def test_every_kernel_is_compiled_for_every_processor(here, of_families, monkeypatch) -> None:
    kinds = *KINDS, *STEPPED, *E2M1
    requests = [*of_experts(products(monkeypatch, kinds, get_args(Gate))), *of_families]
    requests += [(attention._attention, one) for one in attentions()]
    assert uncompiled(here, requests) == []


@pytest.mark.parametrize("here", ["neoverse-n1", "neoverse-v2", "apple-m1", "x86-64"], indirect=True)
def test_what_a_processor_is_not_given_is_refused_by_name(here) -> None:
    config = EngineConfig(target="any", activations="int8")
    with pytest.raises(CannotRun, match="--activations int8: the processor has none of the instructions"):
        choose_activations(config, next(iter(known_targets().values())).shape.model("int4"), Device.cpu())


# -- what LLVM cannot compile ------------------------------------------------------------------------------------------


def registers(count: int) -> str:
    """A kernel that needs so many registers at once."""
    of = "{" + ", ".join(["i64"] * count) + "}"
    names = ",".join(["=r"] * count + [str(at) for at in range(count)])
    lines = [f'%all = call {of} asm "", "{names}"({", ".join(f"i64 {at}" for at in range(count))})']
    for at in range(count):
        lines += [f"%v{at} = extractvalue {of} %all, {at}", f"store volatile i64 %v{at}, ptr %to"]
    return "define void @greedy(ptr %to) {\n" + "\n".join([*lines, "ret void", "}"])


def test_a_kernel_that_ends_llvm_does_not_end_us() -> None:
    processor = Processor.here()
    with pytest.raises(CompilationFailed, match="register"):
        processor.compiled(registers(60))
    assert processor.compiled(registers(4)).startswith(b"\x7fELF"), "another child goes on"


def test_a_kernel_that_takes_too_long_is_given_up(monkeypatch) -> None:
    """Products of numbers of 40,000 bits, that is."""
    monkeypatch.setattr("foresay.verifier.ops.kernels.cpu.compiler.SECONDS", 1)
    of, lines = "i40000", ["%x = load i40000, ptr %to"]
    lines += [f"%y{at} = mul {of} %{f'y{at - 1}' if at else 'x'}, %x" for at in range(40)]
    text = "define void @vast(ptr %to) {\n" + "\n".join([*lines, f"store {of} %y39, ptr %to", "ret void", "}"])
    with pytest.raises(CompilationFailed, match="LLVM takes more than 1 s"):
        Compiler()(Job(text, Processor.here().triple, Processor.here().name, ""))


@pytest.fixture
def nothing_kept(monkeypatch, tmp_path) -> None:
    """Kernels are compiled anew, and what could not be is forgotten afterwards."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(Op, "by_reference", False)
    monkeypatch.setattr(launch, "llvm_errors", [])
    monkeypatch.setattr("foresay.server.engine.build.llvm_errors", launch.llvm_errors)


def failing(monkeypatch: pytest.MonkeyPatch, fails: Callable[[str], bool]) -> None:
    """LLVM fails for texts of which that is true."""
    compiled = Processor.compiled

    def compile(processor: Processor, text: str) -> bytes:
        if fails(text):
            raise CompilationFailed("error: register allocation failed")
        return compiled(processor, text)

    monkeypatch.setattr(Processor, "compiled", compile)


@pytest.mark.parametrize(
    ("name", "rounds", "gate"),
    [("cascadelake", True, "silu"), ("haswell", True, ""), ("skylake-avx512", False, "silu")],
)
def test_fewer_rows_at_once_have_the_same_bits(monkeypatch, nothing_kept, name, rounds, gate) -> None:
    made = emulation_of(name)
    monkeypatch.setattr(Processor, "here", classmethod(lambda cls: made))
    for write in (rounded.kernel_of, integer_product.kernel_of):
        monkeypatch.setattr(write, "_made", {})
    x = torch.randn(19, 128, generator=torch.Generator().manual_seed(1))
    found = Linear(matrix_of((128, 64), "q4_k"), None, torch.float32, gate, rounds=rounds)
    whole, tried = found.gated(x), set[str]()

    def first_of_a_kind(text: str) -> bool:
        again = len(tried) > 0 or '@"multiply"' not in text
        tried.add(text)
        return not again

    for write in (rounded.kernel_of, integer_product.kernel_of):
        monkeypatch.setattr(write, "_made", {})
    shutil.rmtree(kernel_cache.directory())
    failing(monkeypatch, first_of_a_kind)
    assert torch.equal(found.gated(x), whole)
    assert launch.llvm_errors == ["multiply: error: register allocation failed"]


def answer(target: str = "bundled") -> tuple[list[int], EngineCore]:
    """Twelve tokens of an engine that drafts nothing."""
    engine = build_engine(
        EngineConfig(target=target, draft="none", dtype="float32", kv_tokens=256, max_model_len=128), costs=known()
    )
    params = SamplingParams(temperature=0.0, max_tokens=12)
    engine.add(Request(id="one", prompt=[5, 6, 7, 8], params=params))
    tokens: list[int] = []
    while engine.has_work:
        tokens += [token for delta in engine.step() for token in delta.tokens]
    return tokens, engine


class Unknown(Processor):
    """A processor for which LLVM compiles next to nothing."""

    def compiled(self, text: str) -> bytes:
        if '@"plan_attention"' in text:  # where keys are is always computed by a kernel
            return super().compiled(text)
        raise CompilationFailed("error: register allocation failed")


def test_where_llvm_compiles_nothing_torch_computes(monkeypatch, nothing_kept) -> None:
    """The same text, and the banner says it in one line."""
    before, _ = answer()
    here = Processor.here()
    unknown = Unknown(here.name, here.features)
    monkeypatch.setattr(Processor, "here", classmethod(lambda cls: unknown))
    shutil.rmtree(kernel_cache.directory(), ignore_errors=True)  # absent if other tests compiled what is needed
    after, engine = answer()
    assert after == before
    assert engine.info.warnings == (
        f"LLVM cannot compile some kernels for this processor ({launch.llvm_errors[0]}): torch computes everything "
        "instead, many times slower; please report this",
    )
