"""What is measured, at full size and in a rehearsal."""

from __future__ import annotations

from dataclasses import dataclass

from bench.gpu import kernel_tests, probe, shapes
from bench.gpu.shapes import EagleShape, ModelShape

#: Seconds that the whole run may take.
LIMIT = 480.0


@dataclass(frozen=True, slots=True)
class Settings:
    """One way of running the benchmark.

    models: measured in this order. bar: the one that the bars are about. draft: the shape of the draft model. eagle: of
    the head. rows, contexts: of verifying steps. patience: seconds spent on each timing. steps: timed for p99 over p50.
    tests: pytest's selection. tests_limit: seconds
    for these and for compiling. tokens: of each answer that is timed; same_tokens: that is
    compared. prompts: how many are timed. positions: the longest text. block: whole steps in a row. levels: of drafted
    chains. bits: contexts behind which bits are compared. tree: of a whole step. prompts_read: tokens of prompts whose
    reading is timed. swept: rows of the products whose tiles are tried.
    """

    models: tuple[ModelShape, ...]
    bar: ModelShape
    draft: ModelShape
    eagle: EagleShape
    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    probe_bytes: int
    patience: float
    steps: int
    tests: tuple[str, ...]
    tests_limit: float
    tokens: int
    same_tokens: int
    prompts: int
    positions: int
    block: int
    levels: tuple[int, ...]
    bits: tuple[int, ...]
    tree: str
    prompts_read: tuple[int, ...]
    swept: tuple[int, ...]


def full() -> Settings:
    """What a machine with a large GPU measures."""
    large = shapes.LLAMA_8B
    return Settings(
        models=(large, shapes.QWEN_8B, shapes.LLAMA_1B),
        bar=large,
        draft=shapes.LLAMA_1B,
        eagle=EagleShape(4096, 32, 8, 128, 14336, 32_000),
        rows=(1, 8, 16, 32, 64),
        contexts=(1024, 8192, 32_768),
        probe_bytes=probe.PROBE_BYTES,
        patience=0.15,
        steps=10_000,
        tests=(kernel_tests.TESTS,),
        tests_limit=150.0,
        tokens=256,
        same_tokens=128,
        prompts=2,
        positions=shapes.POSITIONS,
        block=100,
        levels=(3, 5, 7),
        bits=(1_100, 8_300),
        tree="4,8,12,12,12",
        prompts_read=(128, 1024),
        swept=(1, 16, 64, 512),
    )


def tiny() -> Settings:
    """A rehearsal: every part, at sizes that a CPU takes in its stride."""
    return Settings(
        models=(shapes.TINY, shapes.TINY_QK),
        bar=shapes.TINY,
        draft=shapes.TINY_DRAFT,
        eagle=EagleShape(288, 4, 2, 64, 400, 500),
        rows=(1, 4),
        contexts=(32, 96),
        probe_bytes=probe.TINY_BYTES,
        patience=0.002,
        steps=20,
        tests=kernel_tests.TINY_TESTS,
        tests_limit=60.0,
        tokens=8,
        same_tokens=6,
        prompts=1,
        positions=512,
        block=8,
        levels=(3, 5),
        bits=(70,),
        tree="3,2,1",
        prompts_read=(20,),
        swept=(2, 70),
    )
