"""Random weights of few bits, of every kind that there is."""

from __future__ import annotations

from dataclasses import replace

import torch

from foresay.verifier.ops.quantized import E8M0, FP8, QuantizedMatrix

#: Bits, numbers of a group (None: all of a row), whether zero is 0, and the scales' dtype.
KINDS = {
    "int8": (8, None, True, torch.bfloat16),
    "int8 groups": (8, 32, True, torch.float16),
    "int8 zeros": (8, None, False, torch.float32),
    "int4": (4, 32, True, torch.bfloat16),
    "int4 zeros": (4, 64, False, torch.float16),
    "int4 rows": (4, None, True, torch.float32),
    "fp8": (8, None, True, torch.bfloat16),
    "fp8 groups": (8, 64, True, torch.float32),
}
#: Floats of 4 bits: numbers of a group, and the scales' dtype.
E2M1 = {"mxfp4": (32, E8M0), "nvfp4": (16, FP8), "nvfp4 steps": (16, FP8)}
#: As GGUF has them: bits, numbers of a group and of a span, and whether there are minimums.
STEPPED = {
    "q4_k": (4, 32, 64, True),
    "q5_k": (8, 32, 64, True),
    "q6_k": (8, 16, 64, False),
    "mixed": (8, 16, 32, True),
    "q4_1": (4, 32, 32, True),
}


def stepped_of(shape: tuple[int, int], kind: str) -> QuantizedMatrix:
    """Random numbers, scales, minimums and steps."""
    bits, group, span, minimums = STEPPED[kind]
    generator = torch.Generator().manual_seed(shape[0])
    cpu = torch.device("cpu")
    empty = QuantizedMatrix.empty(shape[1], shape[0], bits, group, True, torch.int8, cpu)
    matrix = empty.with_steps(span, minimums)
    highest = 1 << (4 if bits == 4 else 5)
    least = 0 if minimums else -highest
    matrix.put(torch.randint(least, highest, matrix.shape, dtype=torch.int8, generator=generator))
    for multiples, steps in ((matrix.scales, matrix.steps), (matrix.minimums, matrix.minimum_steps)):
        if multiples is not None and steps is not None:
            multiples.copy_(
                torch.randint(1, 2 if kind == "q4_1" else 64, multiples.shape, dtype=torch.int8, generator=generator)
            )
            sampled = torch.rand(steps.shape, generator=generator)
            steps.copy_(sampled / 30 / highest / shape[0] ** 0.5 * (1 if multiples is matrix.scales else highest / 2))
    return matrix


def e2m1_of(shape: tuple[int, int], group: int, scales: torch.dtype) -> QuantizedMatrix:
    """Random codes and scales."""
    generator, (inner, outer) = torch.Generator().manual_seed(shape[0]), shape
    matrix = QuantizedMatrix.empty(outer, inner, 4, group, True, scales, torch.device("cpu"), True)
    matrix.put(torch.randint(16, matrix.shape, dtype=torch.int8, generator=generator))
    low = 116 if scales is E8M0 else 8
    bits = torch.randint(low, low + 8, matrix.scales.shape, dtype=torch.uint8, generator=generator)
    matrix.scales.copy_(bits.view(scales))
    return matrix


def matrix_of(shape: tuple[int, int], kind: str) -> QuantizedMatrix:
    if kind in STEPPED:
        return stepped_of(shape, kind)
    if kind in E2M1:
        matrix = e2m1_of(shape, *E2M1[kind])
        if kind == "nvfp4 steps":
            matrix = replace(matrix, steps=torch.linspace(0.3, 1.7, shape[1])[:, None])
        return matrix
    bits, group, symmetric, scales = KINDS[kind]
    generator = torch.Generator().manual_seed(shape[0])
    weight = torch.randn(shape[::-1], generator=generator) / shape[0] ** 0.5
    cpu = torch.device("cpu")
    matrix = QuantizedMatrix.empty(
        shape[1], shape[0], bits, group or shape[0], symmetric, scales, cpu, kind.startswith("fp8")
    )
    matrix.fill(weight + 0.01 * (not symmetric))
    return matrix
