"""Kernels that were written for another x86 processor, run on this one: the few instructions that it may lack become
functions in LLVM IR, and LLVM divides wide vectors. So what is run is our code for that processor, all but LLVM's last
step, which `test_cpu_processors.py` compiles.

bf16 dot products are not among them: what they round inside is not said.
"""

from __future__ import annotations

import re

from foresay.verifier.ops.kernels.cpu.jit import Processor

HERE = Processor.here()
AVX2 = "+avx2,+fma,+f16c"
AVX512 = f"{AVX2},+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512cd"
_X86 = "x86_64-unknown-linux-gnu"
#: By name: what LLVM calls each, and the features that kernels ask for.
PROCESSORS = {
    name: Processor(name, features, _X86)
    for name, features in {
        "x86-64": "",
        "haswell": AVX2,
        "znver1": AVX2,
        "znver2": AVX2,
        "znver3": AVX2,
        "x86-64-v3": AVX2,
        "alderlake": f"{AVX2},+avxvnni",
        "skylake-avx512": AVX512,
        "x86-64-v4": AVX512,
        "cascadelake": f"{AVX512},+avx512vnni",
        "icelake-server": f"{AVX512},+avx512vnni,+avx512vbmi",
        "znver4": f"{AVX512},+avx512vnni,+avx512vbmi,+avx512bf16",
        "znver5": f"{AVX512},+avx512vnni,+avxvnni,+avx512vbmi,+avx512bf16",
        "sapphirerapids": f"{AVX512},+avx512vnni,+avxvnni,+avx512vbmi,+avx512bf16,+amx-int8,+amx-bf16",
        "graniterapids": f"{AVX512},+avx512vnni,+avxvnni,+avx512vbmi,+avx512bf16,+amx-int8,+amx-bf16",
    }.items()
} | {
    "neoverse-n1": Processor("neoverse-n1", "+neon", "aarch64-unknown-linux-gnu"),
    "neoverse-v2": Processor("neoverse-v2", "+neon,+bf16", "aarch64-unknown-linux-gnu"),
    "apple-m1": Processor("apple-m1", "+neon", "arm64-apple-darwin"),
}


def _lanes(every: int, first: int, count: int) -> str:
    return ", ".join(f"i32 {first + every * at}" for at in range(count))


def _parts(name: str, of: str, lanes: int, every: int, to: str, how: str) -> list[str]:
    """Lines that take each ``every``-th number of a vector, from the first, the second, .. on, as larger numbers."""
    return [
        f"%{name}{at}n = shufflevector <{lanes} x {of}> %{name}, <{lanes} x {of}> poison, "
        f"<{lanes // every} x i32> <{_lanes(every, at, lanes // every)}>\n"
        f"%{name}{at} = {how} <{lanes // every} x {of}> %{name}{at}n to <{lanes // every} x {to}>"
        for at in range(every)
    ]


def _sum_of_products(every: int, start: str, of: str) -> list[str]:
    """Lines that add products of parts to ``start``; the sum is %s."""
    lines, total = [], start
    for at in range(every):
        lines += [f"%p{at} = mul <{of}> %a{at}, %b{at}", f"%s{at} = add <{of}> {total}, %p{at}"]
        total = f"%s{at}"
    return lines


def _function(name: str, result: str, arguments: str, lines: list[str], value: str) -> str:
    return f'define internal {result} @"{name}"({arguments}) {{\n' + "\n".join([*lines, f"ret {result} {value}", "}"])


_BYTES = "<64 x i8> %a, <64 x i8> %b"
#: What each does, by LLVM's names.
_FUNCTIONS = {
    "llvm.x86.avx512.vpdpbusd.512": lambda name: _function(
        name, "<16 x i32>", f"<16 x i32> %t, {_BYTES}",
        [*_parts("a", "i8", 64, 4, "i32", "zext"), *_parts("b", "i8", 64, 4, "i32", "sext"),
         *_sum_of_products(4, "%t", "16 x i32")], "%s3",
    ),
    "llvm.x86.avx512.pmaddubs.w.512": lambda name: _function(
        name, "<32 x i16>", _BYTES,
        [*_parts("a", "i8", 64, 2, "i32", "zext"), *_parts("b", "i8", 64, 2, "i32", "sext"),
         *_sum_of_products(2, "zeroinitializer", "32 x i32"),
         "%low = call <32 x i32> @llvm.smax.v32i32(<32 x i32> %s1, <32 x i32> splat (i32 -32768))",
         "%both = call <32 x i32> @llvm.smin.v32i32(<32 x i32> %low, <32 x i32> splat (i32 32767))",
         "%w = trunc <32 x i32> %both to <32 x i16>"], "%w",
    ),
    "llvm.x86.avx512.pmaddw.d.512": lambda name: _function(
        name, "<16 x i32>", "<32 x i16> %a, <32 x i16> %b",
        [*_parts("a", "i16", 32, 2, "i32", "sext"), *_parts("b", "i16", 32, 2, "i32", "sext"),
         *_sum_of_products(2, "zeroinitializer", "16 x i32")], "%s1",
    ),
    "llvm.x86.avx512.pshuf.b.512": lambda name: _function(
        name, "<64 x i8>", _BYTES,
        [line for at in (0, 1) for line in (
            *(f"%{each}{at} = shufflevector <64 x i8> %{each}, <64 x i8> poison, <32 x i32> <{_lanes(1, 32 * at, 32)}>"
              for each in "ab"),
            f"%r{at} = call <32 x i8> @llvm.x86.avx2.pshuf.b(<32 x i8> %a{at}, <32 x i8> %b{at})")]
        + [f"%w = shufflevector <32 x i8> %r0, <32 x i8> %r1, <64 x i32> <{_lanes(1, 0, 64)}>"], "%w",
    ),
}  # fmt: skip
_DECLARED = """
declare <32 x i32> @llvm.smax.v32i32(<32 x i32>, <32 x i32>)
declare <32 x i32> @llvm.smin.v32i32(<32 x i32>, <32 x i32>)
declare <32 x i8> @llvm.x86.avx2.pshuf.b(<32 x i8>, <32 x i8>)
"""
_ASSEMBLY = re.compile(r'call \{(<32 x i16>(?:, <32 x i16>)*)\} asm +"", "[^"]*"\(')


def emulated(text: str) -> str:
    """A kernel's text without instructions that this processor may lack."""
    functions = [make(f"emulated {name}") for name, make in _FUNCTIONS.items() if f'@"{name}"' in text]
    for name in _FUNCTIONS:
        text = re.sub(rf'^declare .*@"{re.escape(name)}".*$', "", text, flags=re.M)
        text = text.replace(f'@"{name}"', f'@"emulated {name}"')
    for types in sorted({found[1] for found in _ASSEMBLY.finditer(text)}):
        functions.append(_unchanged(types.split(", ")))
    text = _ASSEMBLY.sub(lambda found: f'call {{{found[1]}}} @"unchanged {found[1].count("<")}"(', text)
    return text + _DECLARED * bool(functions) + "\n".join(functions)


def _unchanged(types: list[str]) -> str:
    """What an empty piece of assembly returns: its arguments."""
    of, last, lines = "{" + ", ".join(types) + "}", "poison", []
    for at, each in enumerate(types):
        lines.append(f"%r{at} = insertvalue {of} {last}, {each} %a{at}, {at}")
        last = f"%r{at}"
    return _function(
        f"unchanged {len(types)}", of, ", ".join(f"{each} %a{at}" for at, each in enumerate(types)), lines, last
    )


class Emulated(Processor):
    """A processor for which kernels are written; they run on this one."""

    def key_of(self, *parts: str) -> str:
        return super().key_of("emulated on", HERE.name, HERE.features, *parts)

    def compiled(self, text: str) -> bytes:
        return HERE.compiled(emulated(text))

    def machine(self) -> object:
        return HERE.machine()


def emulation_of(name: str) -> Processor:
    """This processor of the table, emulated."""
    one = PROCESSORS[name]
    return Emulated(one.name, one.features, one.triple)
