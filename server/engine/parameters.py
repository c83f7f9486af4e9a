"""Dtypes of a model's weights and KV cache, and the bytes that they take; this machine's memory, and its processor's
abilities. Does not import torch."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from foresay.server.settings.config import EngineConfig
from foresay.server.settings.resolved import CannotRun
from foresay.spec.shape import MAX_NODES, TreeShape
from foresay.verifier.model.config import ModelConfig, matrices, products, table_numbers, window_shapes
from foresay.verifier.model.mla import Latent
from foresay.verifier.model.quantization import HEAD, Quantization
from foresay.verifier.ops.kernels.cpu.jit import Processor

#: Where the memory's control groups are, and each one's file with its limit (cgroup v2, v1).
_GROUPS = {"": ("/sys/fs/cgroup", "memory.max"), "memory": ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")}
_OWN = Path("/proc/self/cgroup")
#: Device files of GPU drivers: NVIDIA's, NVIDIA's under WSL, AMD's.
_GPUS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
#: Instructions that multiply bf16, as LLVM names them.
_BF16 = ("avx512bf16", "amx-bf16", "bf16")


def machine_bytes() -> int:
    """Most bytes that this process may hold: the machine's memory, or the limit of its container or service."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with suppress(OSError):  # no control groups
        for file in _limits(_OWN.read_text()):
            with suppress(OSError, ValueError):  # "max" means no limit; a container does not see groups around its own
                limits.append(int(file.read_text()))
    return min(limits)


def _limits(groups: str) -> Iterator[Path]:
    """Files with the memory limits of a process's control group and of all around it. groups: what its
    /proc/PID/cgroup has, lines of ``number:controllers:path``."""
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        for kind in _GROUPS.keys() & controllers.split(","):
            root, name = _GROUPS[kind]
            group = Path(root, path.lstrip("/"))
            yield from (around / name for around in (group, *group.parents) if around.is_relative_to(root))


def free_bytes() -> int | None:
    """Bytes free now, including the page cache; None if the system does not report them."""
    with suppress(OSError, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * int(next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), "none"))
    return None


def may_have_gpu() -> bool:
    """Whether it is worth a second or two to let torch look for a GPU."""
    return any(Path(name).exists() for name in _GPUS)


def multiplies_bf16() -> bool:
    """Whether the processor multiplies bf16 natively."""
    return any(map(Processor.here().has, _BF16))


#: Tokens that ``--draft-vocab auto`` drafts, of a vocabulary of at least twice as many: one to four in a hundred tokens
#: of an English text are then missing where they first occur (with Qwen2.5's tokenizer).
AUTO_VOCAB, DRAFTED = "auto", 1 << 15
#: State pages of a running text (its state, its mark and two spares), of a step that runs ahead of the host, and of
#: checkpoints, if prefixes are reused.
_OF_A_TEXT, _AHEAD, _CHECKPOINTS = 4, 2, 16
#: The most sequences of a captured step.
_CAPTURED = 16


def quantized(model: ModelConfig, how: str | None, flag: str) -> ModelConfig:
    """The model's configuration as it will be loaded. how: the setting's value. Raises CannotRun if it is already
    quantised."""
    if how is None:
        return model
    if model.quantization is not None:
        found = f"its weights are quantised already ({model.quantization})"
        raise CannotRun(f"{flag} {how}: {found}", f"leave {flag} out, or name the model that it was made from")
    return replace(model, quantization=Quantization.made(how))


def kv_kind(model: ModelConfig, setting: str) -> str:
    """``int8``, ``fp8``, ``bfloat16``, or ``auto`` for the engine's dtype. setting: the setting's value; for ``auto``,
    config.json decides (``kv_cache_scheme``). Raises CannotRun where it cannot be another than the engine's."""
    latent = any(isinstance(one, Latent) for one in model.stack.attentions)
    if latent and setting != "auto":
        fault = f"a KV cache of latents ({model.architecture}) cannot be kept in {setting}"
        raise CannotRun(fault, "leave --kv-dtype and --draft-kv-dtype out")
    return (setting == "auto" and not latent and model.quantization is not None and model.quantization.kv) or setting


def in_words(model: ModelConfig, dtype: str, activations: str) -> str:
    """How the weights are quantised, for people; "" if they are not. dtype, activations: the engine's."""
    found = model.quantization
    if found is None:
        return ""
    source = "made of the files' floats" if found.is_made else f"from {found.method} files"
    rounded = f"not rounded to {found.activations}" if found.activations else "not rounded"
    stay = "activations rounded to int8" if activations == "int8" else f"activations stay {dtype}, {rounded}"
    return f"{found} ({source}; {stay})"


def kept_in_16_bits(model: ModelConfig, dtype: str) -> bool:
    """Whether a CPU that computes in fp32 keeps the matrices in 16 bits, judging by config.json."""
    return dtype == "float32" and model.dtype in ("bfloat16", "float16")


def packed_bytes(model: ModelConfig, dtype: str) -> int:
    """Bytes of the weights on a CPU, with output head and embedding as separate matrices."""
    return model_bytes(model, dtype, packed=True)


def model_bytes(model: ModelConfig, dtype: str, packed: bool) -> int:
    """Bytes of a model's weights. packed: as on a CPU, where an output head tied to the embedding is a matrix of its
    own, and tables of floats stay in their files."""
    item = 2 if packed and kept_in_16_bits(model, dtype) else item_bytes(dtype)
    inside = sum(_matrix_bytes(model, *each, item, packed) for each in matrices(model))
    table = held_table_bytes(model, dtype, packed)
    return inside + item_bytes(dtype) * model.vocab_size * model.hidden_size + table


def drafted(vocab_size: int, setting: str) -> int:
    """How many of a drafter's tokens are drafted with this ``--draft-vocab``."""
    if setting == AUTO_VOCAB:
        return DRAFTED if vocab_size >= 2 * DRAFTED else vocab_size
    return vocab_size if setting == "full" else min(int(setting), vocab_size)


def drafted_bytes(model: ModelConfig, dtype: str, setting: str) -> int:
    """Bytes of the output matrix's rows that a CPU copies for a drafter with this ``--draft-vocab``."""
    count = drafted(model.vocab_size, setting)
    item = 2 if kept_in_16_bits(model, dtype) else item_bytes(dtype)
    return 0 if count == model.vocab_size else _matrix_bytes(model, HEAD, model.hidden_size, count, item, True)


def table_bytes(model: ModelConfig, dtype: str) -> int:
    """Bytes of the table of embeddings that layers have of their own. dtype: of its numbers."""
    return item_bytes(dtype) * table_numbers(model)


def held_table_bytes(model: ModelConfig, dtype: str, packed: bool) -> int:
    """Bytes of it that are held, in the engine's dtype: none where a CPU (packed) leaves it in the files, where pages
    come and go as they are read. It reads floats there; of few bits it makes some."""
    own = model.stack.embedding
    return 0 if own is None or (packed and not own.in_blocks) else table_bytes(model, dtype)


def _matrix_bytes(model: ModelConfig, module: str, inner: int, outer: int, item: int, packed: bool) -> int:
    """Bytes of one matrix. item: bytes of a float."""
    quantization, tied = model.quantization, module == HEAD and model.tie_word_embeddings
    scheme = None if quantization is None else quantization.scheme(module, inner)
    if quantization is None or scheme is None or (tied and not quantization.with_head):
        same = tied and not packed and model.stack.embedding_scale == 1.0  # it is the embedding itself
        return 0 if same else item * inner * outer
    return scheme.nbytes(outer, inner, packed)


def expert_bytes(model: ModelConfig, dtype: str) -> dict[int, int]:
    """Bytes of the experts of each layer that has some, on a GPU; none if their numbers are in an order of their own
    (GPTQ's), which takes further copies to change."""
    found = Counter[int]()
    for number, product in products(model):
        module = f"model.layers.{number}.{next(iter(product.rows))}"
        scheme = None if model.quantization is None else model.quantization.scheme(module, product.inner)
        if product.experts and scheme is not None and scheme.ordered:
            return {}
        if product.experts:
            found[number] += _matrix_bytes(model, module, product.inner, product.outer, item_bytes(dtype), False)
    return dict(found)


def token_bytes(model: ModelConfig, dtype: str, kv_dtype: str, windowed: bool | None = None) -> int:
    """Bytes of a model's KV cache for one token; if quantised, each head also has an fp32 scale.

    windowed: only layers with a window, or only the others; None: all.
    """
    kept = [shape for shape in window_shapes(model) if windowed in (None, shape.window is not None)]
    if (kind := kv_kind(model, kv_dtype)) in ("auto", "bfloat16"):
        return item_bytes(dtype if kind == "auto" else kind) * sum(shape.numbers for shape in kept)
    return sum(shape.numbers + 4 * 2 * shape.heads for shape in kept)


def state_pages(config: EngineConfig, on_gpu: bool) -> tuple[int, int]:
    """Sequences of a pass that leave records, and state pages, for a model with recurrent layers. At least two
    sequences: the start-up probe reads two texts at once. Captured steps of a GPU have room for 1, 2, 4 .. of them."""
    sequences, captured = max(config.max_seqs, 2), min(1 << (config.max_seqs - 1).bit_length(), _CAPTURED)
    pages = 1 + (_OF_A_TEXT + _AHEAD * on_gpu) * sequences + (_CHECKPOINTS if config.prefix_cache else 0)
    return max(sequences, captured) if on_gpu else sequences, pages


def state_bytes(model: ModelConfig, sequences: int, pages: int) -> int:
    """Bytes of :class:`foresay.kvpaging.states.StateStore`, all in fp32: state pages, and records of whole trees."""
    found = model.stack.recurrence
    if found is None:
        return 0
    page = found.value_heads * found.value_dim * found.key_dim + (found.taps - 1) * found.channels
    record = found.record + found.channels
    layers = sum(shape.state is not None for shape in window_shapes(model))
    return 4 * layers * (pages * page + MAX_NODES * sequences * record)


def item_bytes(dtype: str) -> int:
    """Bytes of one number."""
    return 4 if dtype == "float32" else 2


def wanted_rows(config: EngineConfig) -> int:
    """Most rows of a step that need logits: the roots and nodes of trees."""
    if (shape := pinned(config)) is None:
        return config.max_seqs + min(config.max_seqs, 4) * MAX_NODES
    return config.max_seqs * shape.nodes


def pinned(config: EngineConfig) -> TreeShape | None:
    """The fixed shape that the settings request: a tree or a chain; None if they leave it open."""
    if config.draft_tree is not None:
        return TreeShape.parse(config.draft_tree)
    return None if config.draft_tokens is None else TreeShape.chain(config.draft_tokens)
