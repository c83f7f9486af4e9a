"""How much memory an engine will hold, and how much this machine has; known before a weight is read.

::

    weights   target, draft model or head, in the engine's dtype
    KV cache  pages * page_size tokens, each as many numbers as all models together keep of it
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from server.config import EngineConfig
from server.heads import Head
from server.unfit import Unfit
from spec.tree import MAX_NODES
from verifier.heads.files import HeadTensors
from verifier.heads.medusa import BESIDE_MODEL
from verifier.model.config import ModelConfig

#: Share of the machine's memory that the KV cache takes when no size is given, and the most that all may take then.
_KV_SHARE = 0.25
_ALL_SHARE = 0.95
#: The start-up probe of exactness needs so many tokens.
_PROBE_TOKENS = 128
#: Where a container's limit is written (cgroup v2, v1); on a bare machine there is none.
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What an engine will hold, in bytes.

    weights: by whose they are. tokens: of text that the KV cache holds. pages: of the pool, room for drafts and padding
    among them. kv_bytes: of all pages. machine: what there is at all.
    """

    weights: Mapping[str, int]
    tokens: int
    pages: int
    kv_bytes: int
    machine: int

    @property
    def total(self) -> int:
        """Weights and KV cache."""
        return sum(self.weights.values()) + self.kv_bytes

    @property
    def described(self) -> str:
        """Its parts, in words."""
        parts = [f"{name} {in_words(count)}" for name, count in self.weights.items()]
        return f"{', '.join(parts)}, KV cache of {self.tokens:,} tokens {in_words(self.kv_bytes)}"


def plan(config: EngineConfig, length: int, dtype: str, models: Sequence[ModelConfig], head: Head | None) -> MemoryPlan:
    """The pages: ``kv_tokens`` if given, else all sequences at full length, within a share of the memory.

    length: the longest text. models: the target and perhaps a draft model.
    Raises Unfit if the longest text does not fit the KV cache, or everything together not the machine, and a loader's
    error for a head that cannot be read.
    """
    weights = _weights(dtype, models, head)
    numbers = sum(2 * model.num_layers * model.num_kv_heads * model.head_dim for model in models)
    numbers += head.numbers_per_token(models[0]) if head else 0
    per_token, machine = numbers * _item_bytes(dtype), machine_bytes()
    beside, scratch = sum(weights.values()), config.max_seqs * (MAX_NODES + config.page_size)
    if beside > machine:
        raise Unfit(_too_much("the weights alone", beside, weights, machine), _smaller_weights(dtype))
    affordable = int(min(machine * _KV_SHARE, machine * _ALL_SHARE - beside) / per_token)
    tokens = config.kv_tokens or min(config.max_seqs * length, max(affordable, 0))
    if tokens < length:
        raise Unfit(f"the KV cache holds {tokens} tokens, fewer than max_model_len ({length})", "lower --max-model-len")
    pages = 1 + -(-(max(tokens, _PROBE_TOKENS) + scratch) // config.page_size)
    kv_bytes = pages * config.page_size * per_token
    if beside + kv_bytes > machine:
        taken = {**weights, f"KV cache of {tokens:,} tokens": kv_bytes}
        raise Unfit(_too_much("the engine", beside + kv_bytes, taken, machine), _smaller_cache(affordable, length))
    return MemoryPlan(weights, tokens, pages, kv_bytes, machine)


def parameters(model: ModelConfig) -> int:
    """The number of weights, near enough to plan with; an output head tied to the embedding is packed beside it."""
    heads = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    layer = model.hidden_size * (heads + 3 * model.intermediate_size)
    return model.num_layers * layer + 2 * model.vocab_size * model.hidden_size


def _weights(dtype: str, models: Sequence[ModelConfig], head: Head | None) -> dict[str, int]:
    """Bytes by whose they are. A head is small enough to be counted exactly; mapped files are not read for that."""
    counts = dict(zip(("target", "draft model"), map(parameters, models), strict=False))
    if head is not None:
        stored = HeadTensors.read(head.directory, prefix=BESIDE_MODEL).tensors.values()
        counts["head"] = sum(tensor.numel() for tensor in stored if tensor.is_floating_point())
    return {name: count * _item_bytes(dtype) for name, count in counts.items()}


def _item_bytes(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def machine_bytes() -> int:
    """What this process may hold at most: the machine's memory, or the container's share of it."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [physical]
    for file in _LIMITS:
        with suppress(OSError, ValueError):  # "max" where there is no limit
            limits.append(int(Path(file).read_text()))
    return min(limits)


def free_bytes() -> int | None:
    """What is free now, files that are merely cached counted as free; None where the system does not say."""
    with suppress(OSError, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * int(next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), "none"))
    return None


def in_words(count: int) -> str:
    """Bytes for people: ``14.7 MiB``."""
    amount, units = float(count), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while amount >= 1000 and len(units) > 1:
        amount, units = amount / 1024, units[1:]
    return f"{amount:.0f} {units[0]}" if units[0] == "bytes" or amount >= 100 else f"{amount:.1f} {units[0]}"


def _too_much(what: str, total: int, parts: Mapping[str, int], machine: int) -> str:
    listed = ", ".join(f"{name} {in_words(count)}" for name, count in parts.items())
    return f"{what} would take {in_words(total)} ({listed}), but this machine has {in_words(machine)}"


def _smaller_weights(dtype: str) -> str:
    halved = "load them with --dtype bfloat16, or " if dtype == "float32" else ""
    return f"{halved}name a smaller model"


def _smaller_cache(affordable: int, length: int) -> str:
    """affordable: tokens that fit, room for drafts aside."""
    return f"--kv-tokens {affordable} fits" if affordable >= length else "lower --max-model-len and --kv-tokens"
