"""The memory of a catalog target in bf16, int8 and int4, and which of these fit this machine, by the server's own
memory plan. Imports torch only if there may be a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from foresay.server.catalog.catalog import KnownDraft, KnownTarget
from foresay.server.engine.memory import Demand, plan_cpu
from foresay.server.engine.parameters import (
    cpu_dtype,
    free_bytes,
    item_bytes,
    machine_bytes,
    may_have_gpu,
    model_bytes,
    multiplies_bf16,
    token_bytes,
)
from foresay.server.settings.config import EngineConfig
from foresay.server.settings.resolved import CannotRun
from foresay.server.settings.units import bytes_in_words
from foresay.verifier.model.config import ModelConfig

if TYPE_CHECKING:
    from foresay.server.engine.device import Device

#: Formats of weights, and the value of ``--quantize`` for each: the first that fits loses least.
WEIGHTS = {"bf16": None, "int8": "int8", "int4": "int4"}
#: Tokens of the KV cache that is included.
TOKENS = 4096


@dataclass(frozen=True, slots=True)
class _Draft:
    """A drafter whose files are not on disk, with the interface that the memory plan needs."""

    known: KnownDraft

    def shapes(self, target: ModelConfig) -> tuple[ModelConfig, ...]:
        return () if self.known.shape is None else (self.known.shape.model(),)

    def with_states(self, target: ModelConfig) -> tuple[ModelConfig, ...]:
        return self.shapes(target)

    def token_bytes(self, target: ModelConfig, dtype: str) -> int:
        models = self.shapes(target)
        return token_bytes(models[0], dtype, "auto") if models else item_bytes(dtype) * self.known.numbers_per_token

    def weights(self, dtype: str, packed: bool) -> Mapping[str, int]:
        shape, numbers = self.known.shape, self.known.parameters
        count = item_bytes(dtype) * numbers if shape is None else model_bytes(shape.model(), dtype, packed)
        return {self.known.kind: count}


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a model would run. total, free: bytes of its memory. gpu: None if it is the CPU. has_bf16: whether the CPU
    multiplies bf16."""

    total: int
    free: int
    gpu: Device | None = None
    has_bf16: bool = True

    @classmethod
    def here(cls) -> Machine:
        """This machine's device, as the server would choose it."""
        if may_have_gpu():
            from foresay.server.engine.device import find_device

            if (found := find_device(EngineConfig())).is_gpu:
                return cls(found.total, found.total if found.free is None else found.free, found)
        total, free = machine_bytes(), free_bytes()
        return cls(total, total if free is None else min(free, total), None, multiplies_bf16())

    def __str__(self) -> str:
        name = "CPU" if self.gpu is None else self.gpu.model
        return f"{name}, {bytes_in_words(self.free)} of {bytes_in_words(self.total)} of memory free"

    def dtype(self, model: ModelConfig) -> str:
        """The dtype that the server would compute in."""
        if self.gpu is None:
            return cpu_dtype(model, self.has_bf16, self.total).value
        from foresay.server.engine.build import choose_dtype

        return choose_dtype(EngineConfig(), model, self.gpu).value

    def planned(self, model: ModelConfig, drafts: Sequence[_Draft], config: EngineConfig) -> int | None:
        """Bytes that a server with these settings would take; None if it would refuse, or there is less memory free
        now."""
        length = config.max_model_len or min(model.max_positions, config.kv_tokens or model.max_positions)
        dtype = self.dtype(model)
        try:
            if self.gpu is not None:
                from foresay.server.engine.gpu_memory import plan_gpu

                found = plan_gpu(config, length, dtype, model, drafts, self.gpu)
                return None if found.away else found.total
            taken = plan_cpu(config, length, Demand.of(config, dtype, model, drafts), self.total).total
        except CannotRun:
            return None
        return taken if taken <= self.free else None


def _drafts(draft: KnownDraft | None) -> list[_Draft]:
    return [] if draft is None else [_Draft(draft)]


def needed(target: KnownTarget, weights: str, draft: KnownDraft | None, machine: Machine) -> int:
    """Bytes of the weights, of working memory, and of a KV cache of ``TOKENS`` tokens."""
    model, drafts = target.shape.model(WEIGHTS[weights]), _drafts(draft)
    demand = Demand.of(EngineConfig(), machine.dtype(model), model, drafts, packed=machine.gpu is None)
    return sum(demand.weights.values()) + demand.recordings + demand.kv_bytes(TOKENS)


def fitting(target: KnownTarget, draft: KnownDraft | None, machine: Machine) -> str | None:
    """The first of ``WEIGHTS`` that fits, with a KV cache of ``TOKENS`` tokens; None if none does."""
    drafts, least = _drafts(draft), EngineConfig(max_model_len=TOKENS, kv_tokens=TOKENS)
    models = ((weights, target.shape.model(how)) for weights, how in WEIGHTS.items())
    return next((weights for weights, model in models if machine.planned(model, drafts, least) is not None), None)


def flags(
    target: KnownTarget, weights: str, draft: KnownDraft | None, machine: Machine, least: int = TOKENS
) -> list[str] | None:
    """Flags for ``foresay serve`` so that the target fits, with the longest possible context. None if even ``least``
    tokens are too many."""
    model, drafts = target.shape.model(WEIGHTS[weights]), _drafts(draft)
    for settings in _lengths(model.max_positions, least):
        config = msgspec.structs.replace(EngineConfig(), **settings)
        if machine.planned(model, drafts, config) is not None:
            words = [] if draft is None else ["--draft", draft.setting]
            words += [] if WEIGHTS[weights] is None else ["--quantize", str(WEIGHTS[weights])]
            named = {f"--{name.replace('_', '-')}": str(tokens) for name, tokens in settings.items()}
            return [*words, *(word for flag in named.items() for word in flag)]
    return None


def _lengths(longest: int, least: int) -> Iterator[dict[str, int]]:
    """Settings from the defaults down to the shortest context; each length first for as many texts at once as there is
    room for, then for one."""
    yield {}
    yield {"kv_tokens": longest}
    length = 1 << (longest - 1).bit_length() - 1
    while length >= least:
        yield {"max_model_len": length}
        yield {"kv_tokens": length}
        length //= 2
