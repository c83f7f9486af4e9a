"""The attention kernels compiled for GPUs that are not here, and the code they become."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foresay.verifier.ops.kernels import chunk_attention, key_blocks, tree_attention
from foresay.verifier.ops.records import AttentionMetadata, FusedRope, Rotation, SplitKSums
from tests.combinations import alternating
from tests.kernels.compiling import CAPABILITIES, Compiled, compile_launches


@dataclass(frozen=True)
class Variant:
    """What the kernels are compiled for anew. group: query heads of a kv head. sequences: of the batch. stored: what
    keys and values are quantised to. sinks: whether heads have some. latent: how many of a key's numbers are its value;
    0: values are apart.
    """

    width: int
    group: int
    page_size: int
    window: int | None
    dtype: torch.dtype
    sequences: int
    stored: torch.dtype | None = None
    softcap: float | None = None
    sinks: bool = False
    latent: int = 0

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        shape = f"{self.width}-group{self.group}-page{self.page_size}-window{self.window}-{kind}-{self.sequences}"
        more = [self.stored, self.softcap and f"cap{self.softcap:g}", "sinks" if self.sinks else None, self.latent]
        return "-".join(map(str, (shape, *filter(None, more))))

    def arguments(self, rows: int, *, text: bool) -> tuple[Tensor, Tensor, Tensor, AttentionMetadata, float]:
        def blank(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        groups = 1 if self.latent else 8
        store = blank(64 * self.page_size, groups, self.width, dtype=self.stored or self.dtype)
        count = self.sequences
        tables, lengths, offsets = blank(count, 63), blank(count), blank(count + 1)
        where = AttentionMetadata(tables, self.page_size, lengths, offsets)
        if not text:
            where.words, where.depths = blank(rows, dtype=torch.int64), blank(rows)
        return blank(rows, groups * self.group, self.width, dtype=self.dtype), store, store, where, 0.1

    def compiled(self, folder: Path, capability: int) -> dict[str, Compiled]:
        """Both launches of large trees and the one of chunks."""
        tree, text = (self.arguments(64, text=text) for text in (False, True))
        more: dict[str, Any] = {
            "scales": torch.empty(64 * self.page_size, 2, 8, device="meta") if self.stored else None,
            "softcap": self.softcap,
            "sinks": torch.empty(8 * self.group, device="meta") if self.sinks else None,
            "shared": self.latent,
        }

        def call() -> None:
            tree_attention.tree_attention(*tree, self.window, **more)
            chunk_attention.chunk_attention(*text, self.window, **more)

        return compile_launches(call, folder, capability)


VARIANTS = [
    Variant(128, 4, 16, None, torch.bfloat16, 1),
    Variant(64, 8, 256, 4096, torch.float16, 4),
    Variant(128, 4, 16, None, torch.bfloat16, 1, torch.int8),
    Variant(256, 2, 128, 1024, torch.bfloat16, 1),
    Variant(576, 128, 16, None, torch.bfloat16, 1, latent=512),
    Variant(64, 8, 16, 128, torch.bfloat16, 1, softcap=50.0, sinks=True),
    Variant(512, 2, 16, 1024, torch.float16, 1, torch.int8),
    Variant(96, 1, 64, None, torch.float16, 2, torch.float8_e4m3fn),
]


def products(code: str) -> set[str]:
    """The matrix instructions of a kernel."""
    return set(re.findall(r"(?:mma\.sync|wgmma\.mma_async)[\w.]+", code))


#: What a partial and a fold are made of besides MMAs; ``rn`` keeps the assembler from fusing a product into a sum.
ARITHMETIC = {"mul.rn.f32", "sub.rn.f32", "fma.rn.f32", "ex2.approx.ftz.f32", "max.f32"}
QUOTIENT = {"div.full.f32"}
#: What capped scores take besides.
CAPPED = QUOTIENT | {"add.rn.f32"}


def arithmetic(code: str) -> set[str]:
    """The other instructions that compute in floats."""
    return set(
        re.findall(r"\b(?:add|sub|mul|mad|fma|div|rcp|ex2|lg2|min|max|redux)(?:\.\w+)*\.f(?:16|32)(?:x2)?\b", code)
    )


@pytest.mark.parametrize(("variant", "capability"), alternating(VARIANTS, CAPABILITIES, 1), ids=str)
def test_trees_and_chunks_multiply_by_the_same_instructions(variant, capability, tmp_path) -> None:
    """Decode, tails of trees and prefill: one tile of 64 stacked rows and 64 keys, so one instruction per product.

    And no sum but those of MMAs and of written multiply-adds: a reduction over threads would need additions.
    """
    made = variant.compiled(tmp_path, capability)
    assert products(made["tree_partials"].ptx) == products(made["chunk_rows"].ptx) == expected(variant, capability)
    assert not products(made["tree_merge"].ptx)
    of_scores = ARITHMETIC | (CAPPED if variant.softcap else set())
    unfolded = of_scores - {"fma.rn.f32"}  # where each program has one block
    assert arithmetic(made["tree_partials"].ptx) in (of_scores, unfolded)
    assert arithmetic(made["tree_merge"].ptx) == ARITHMETIC | QUOTIENT
    assert arithmetic(made["chunk_rows"].ptx) == of_scores | QUOTIENT
    for name, kernel in made.items():
        assert kernel.shared <= {80: 163, 90: 227}[capability] * 1024, name
    assert made["tree_merge"].stack == 0
    loads, *_ = re.split(r"ex2\.approx", made["tree_merge"].ptx)
    assert len(re.findall(r"ld\.global", loads)) >= 2 * 3 * tree_attention.DEPTH, "the next partials are loaded first"
    if capability == 90 and (variant.latent or variant.width <= 128):
        assert made["tree_partials"].stack == 0, "the kernel of every decoding step spills no register"


@pytest.mark.parametrize(("folded", "programs"), [(False, 3), (True, 2)])
def test_as_many_programs_are_on_a_processor(folded, programs, tmp_path) -> None:
    """Of one block each, and of whole splits; nothing spills."""
    tree = VARIANTS[0].arguments(6, text=False)
    made = compile_launches(lambda: tree_attention.tree_attention(*tree, whole_splits=folded), tmp_path, 90)
    kernel = made["tree_partials"]
    assert kernel.stack == 0 and programs * (kernel.shared + 1024) <= 228 * 1024
    assert programs * 128 * -(-kernel.registers // 8) * 8 <= 1 << 16


@pytest.mark.parametrize(("width", "once", "folded"), [(128, True, True), (128, False, False), (64, True, False)])
def test_partials_that_rotate_multiply_by_the_same_instructions(width, once, folded, tmp_path) -> None:
    """And spill nothing, also where they find the slots of their tails."""
    variant = Variant(width, 4, 16, None, torch.bfloat16, 1)
    _, keys, values, rows, scale = variant.arguments(6, text=False)

    def of(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def call() -> None:
        rows.tails = tree_attention.tail_slots(rows) if once else None
        sums = SplitKSums(of(2, 6, (4 + 2) * 8 * width, dtype=torch.float32), None)
        unrotated = FusedRope(sums, Rotation(of(6, 1, width), of(6, 1, width)), of(6, dtype=torch.int64))
        tree_attention.tree_attention(unrotated, keys, values, rows, scale, whole_splits=folded)

    made = compile_launches(call, tmp_path, 90)
    assert set(made) == {"tree_partials", "tree_merge"} | ({"tail_rows"} if once else set())
    kernel = made["tree_partials"]
    assert products(kernel.ptx) == expected(variant, 90) and kernel.stack == 0
    assert 2 * (kernel.shared + 1024) <= 228 * 1024 and 2 * 128 * -(-kernel.registers // 8) * 8 <= 1 << 16
    of_segments = {"add.rn.f32", "fma.rn.f32"}
    assert arithmetic(kernel.ptx) <= ARITHMETIC | of_segments, "as the kernel that rotates: written products and sums"


@pytest.mark.soak
def test_blocks_are_on_their_way_with_one_more_stage(tmp_path, monkeypatch) -> None:
    """Two blocks of a walk at a time, where two stages wait for all; and for one program in a processor of an H100."""
    assert set(waits(VARIANTS[0].compiled(tmp_path, 90)["tree_partials"])) == {0}
    monkeypatch.setattr(key_blocks, "STAGES", 3)
    deeper = VARIANTS[0].compiled(tmp_path, 90)["tree_partials"]
    assert max(waits(deeper)) == 2 and deeper.stack == 0 and 2 * (deeper.shared + 1024) > 228 * 1024


def waits(kernel: Compiled) -> list[int]:
    """How many copies to shared memory may be under way where others are waited for."""
    return [int(count) for count in re.findall(r"cp\.async\.wait_group\s+(\d+)", kernel.ptx)]


def expected(variant: Variant, capability: int) -> set[str]:
    """Scores over 64 keys, sums over 16 columns of ones, values over at most 128 columns. Over latents and
    heads wider than 256 half the warps have half of each, and of 256 columns."""
    kind = {torch.float16: "f16", torch.bfloat16: "bf16"}[variant.dtype]
    if capability == 80:
        return {f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"}
    columns = (
        {32, 8, 128}
        if variant.latent or variant.width > key_blocks.WIDEST
        else {64, 16, 64 if variant.width == 64 else 128}
    )
    return {f"wgmma.mma_async.sync.aligned.m64n{count}k16.f32.{kind}.{kind}" for count in columns}
