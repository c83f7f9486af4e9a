"""What is measured, at full size and in a rehearsal."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from bench import shapes
from bench.engines import Pair
from bench.shapes import EagleShape, ModelShape

_8B = Pair(shapes.LLAMA_8B, shapes.LLAMA_1B, EagleShape(4096, 32, 8, 128, 14336, 32_000))
LARGE = {
    "8B": _8B,
    "1B": Pair(shapes.LLAMA_1B, shapes.SMALL, EagleShape(2048, 32, 8, 64, 8192, 32_000)),
    "8B int8": replace(_8B, quantize="int8"),
    "8B int4": replace(_8B, quantize="int4"),
    "Qwen3-8B": Pair(shapes.QWEN_8B, shapes.SMALL, EagleShape(4096, 32, 8, 128, 12288, 32_000), shapes.DFLASH_8B),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """contexts, prompts: tokens; rows: of passes at the shortest of them. patience: seconds of one timing.
    steps: timed for p99 over p50, and block: in a row, before the text is cut back. tokens: of an answer. levels: of a
    chain by EAGLE, and by a draft model. tree: of a draft model. tests, sanitized: pytest's selections. positions: of
    the longest text. random: whether all weights are random, or the bundled ones are embedded. compiled: steps whose
    kernels are compiled before, all of the plan's if none is named. long: tokens of the longest prompt compared.
    narrowed: what is smaller in configurations of published models."""

    pairs: dict[str, Pair] = field(default_factory=LARGE.copy)
    rows: tuple[int, ...] = (1, 6, 16, 32, 64)
    contexts: tuple[int, ...] = (1024, 8192, 32_000)
    prompts: tuple[int, ...] = (128, 512, 1024)
    probe_bytes: int = 4 << 30
    patience: float = 0.3
    steps: int = 1500
    block: int = 50
    tokens: int = 64
    levels: tuple[int, int] = (5, 4)
    tree: str = "4,8,12,12,12"
    tests: tuple[str, ...] = ("tests/kernels/on_device",)
    positions: int = shapes.POSITIONS
    random: bool = False
    compiled: tuple[str, ...] = ()
    long: int = 700
    narrowed: dict[str, Any] = field(default_factory=dict)
    sanitized: tuple[str, ...] = (*(f"tests/kernels/on_device/test_{name}.py" for name in ("experts", "recurrence")),)

    def thin(self, layers: int) -> Settings:
        """Settings that launch the same kernels, on random models of few layers, and take hardly any time."""

        def cut(shape: ModelShape) -> ModelShape:
            return replace(shape, sizes=replace(shape.sizes, layers=min(layers, shape.sizes.layers)))

        pairs = {name: replace(one, target=cut(one.target), draft=cut(one.draft)) for name, one in self.pairs.items()}
        return replace(self, pairs=pairs, random=True, patience=0.0, steps=0, block=4)


def full() -> Settings:
    """What a machine with a large GPU measures."""
    return Settings()


def tiny() -> Settings:
    """A rehearsal: everything, at sizes that are easy for a CPU."""
    pair = Pair(shapes.TINY, shapes.TINY_DRAFT, EagleShape(288, 4, 2, 64, 400, 500))
    pairs = {name: replace(pair, quantize=large.quantize) for name, large in LARGE.items()}
    pairs["Qwen3-8B"] = Pair(shapes.TINY_QK, shapes.TINY_DRAFT, EagleShape(320, 8, 2, 64, 400, 500), shapes.TINY_DFLASH)
    small = Settings(pairs, (1, 4), (32, 96), (8, 16), 1 << 22, 0.002, 8, 4, 6, (2, 2), "2,1")
    tests = ("tests/kernels/on_device/test_trees.py", "-k", "recent_tokens")
    narrow = {"vocab_size": 4096, "hidden_size": 256, "moe_intermediate_size": 64, "intermediate_size": 64}
    narrow |= {"num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8}
    compiled = ("8B passes", "8B int8", "stack Qwen3.5-9B")
    return replace(small, tests=tests, sanitized=tests, positions=512, compiled=compiled, long=150, narrowed=narrow)
