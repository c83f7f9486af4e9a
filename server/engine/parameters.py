"""What is known of an engine before a weight is read: its device, the types of its numbers and the class of its bits,
and the bytes that weights and KV cache take. Does not import torch.

What a CPU computes in fp32 is *portable*: every sum and function is our own, in an order that no processor changes, so
a seed gives the same text on every CPU (docs/same-tokens.md#portable-bits). In bf16, processors with dot products of it
add in pairs, and the others do not.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec import structs

from foresay.server.settings.config import EngineConfig
from foresay.server.settings.resolved import CannotRun, Resolved
from foresay.spec.shape import MAX_CHUNK, MAX_NODES, TreeShape
from foresay.verifier.model.config import ModelConfig, matrices, products, table_numbers, window_shapes
from foresay.verifier.model.mla import MLA
from foresay.verifier.model.quantization import HEAD, Quantization
from foresay.verifier.ops.kernels.cpu.jit import Processor
from foresay.verifier.ops.quant_groups import GROUP

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


#: GPUs with at least this compute capability multiply bf16.
_BF16_SINCE = (8, 0)
#: Prefill rows in one step of a GPU with tiles of 128 rows: four tiles, so that even the smallest weights of a large
#: model keep all multiprocessors busy.
GPU_CHUNK = 512


@dataclass(frozen=True, slots=True)
class Device:
    """A device's name for torch and its properties; the memory plan and the choice of dtype use nothing else.

    total: bytes of memory. free: bytes of it that are free now, None if the system does not report them. model: a GPU's
    name. capability: a GPU's compute capability; None for the CPU.
    """

    name: str
    total: int
    free: int | None = None
    model: str = ""
    capability: tuple[int, int] | None = None

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU."""
        return self.capability is not None

    @property
    def chunk(self) -> int:
        """Most prefill rows in one step."""
        return GPU_CHUNK if self.capability is not None and self.capability >= (9, 0) else MAX_CHUNK

    @property
    def has_bf16(self) -> bool:
        """Whether it multiplies bf16 natively."""
        if self.capability is not None:
            return self.capability >= _BF16_SINCE
        return multiplies_bf16()

    def __str__(self) -> str:
        """For people: ``cpu``, or ``cuda:0 (NVIDIA H200)``."""
        return f"{self.name} ({self.model})" if self.model else self.name

    @classmethod
    def cpu(cls) -> Device:
        """The processor, with the memory this process may hold."""
        total, free = machine_bytes(), free_bytes()
        return cls("cpu", total, free if free is None else min(free, total))


#: Tokens that ``--draft-vocab auto`` drafts, of a vocabulary of at least twice as many: one to four in a hundred tokens
#: of an English text are then missing where they first occur (with Qwen2.5's tokenizer).
AUTO_VOCAB, DRAFTED = "auto", 1 << 15
#: State pages of a running text (its state, the last boundary's and two free ones), of a step that runs ahead of the
#: host, and of checkpoints, if prefixes are reused.
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
    return replace(model, quantization=Quantization.from_name(how))


def kv_kind(model: ModelConfig, setting: str) -> str:
    """``int8``, ``fp8``, ``bfloat16``, or ``auto`` for the engine's dtype. setting: the setting's value; for ``auto``,
    config.json decides (``kv_cache_scheme``). Raises CannotRun where it cannot be another than the engine's."""
    latent = any(isinstance(one, MLA) for one in model.stack.attentions)
    if latent and setting != "auto":
        fault = f"a KV cache of latents ({model.architecture}) cannot be kept in {setting}"
        raise CannotRun(fault, "leave --kv-dtype and --draft-kv-dtype out")
    return (setting == "auto" and not latent and model.quantization is not None and model.quantization.kv) or setting


def in_words(model: ModelConfig, dtype: str, activations: str) -> str:
    """How the weights are quantised, for people; "" if they are not. dtype, activations: the engine's."""
    found = model.quantization
    if found is None:
        return ""
    source = "made of the files' floats" if found.is_on_the_fly else f"from {found.method} files"
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


# -- types of numbers --------------------------------------------------------------------------------------------------

#: Classes of bits. The portable one has a version: one more when a change of ours changes a token of it.
PORTABLE, FAST, OF_A_GPU = "portable 1", "fast", "gpu"


def bits_of(dtype: str, on_gpu: bool) -> str:
    """The class of the bits of an engine that computes in this dtype."""
    if on_gpu:
        return OF_A_GPU
    return PORTABLE if dtype == "float32" else FAST


def choose_dtype(config: EngineConfig, model: ModelConfig, device: Device) -> Resolved:
    """``auto``: bf16 if the device multiplies it natively; else fp16 on a GPU, and fp32 on a CPU if it fits. With
    portable bits fp32."""
    if config.bits == "portable":
        return _portable(config, device)
    if config.dtype == "float32" and device.name.startswith("cuda"):
        raise CannotRun("--dtype float32: the kernels for a GPU are made for 16-bit weights", "leave --dtype out")
    if config.dtype != "auto":
        return Resolved(config.dtype, "asked for")
    if not device.is_gpu:
        return _cpu_dtype(model, device)
    if device.has_bf16:
        return Resolved("bfloat16", "the GPU multiplies bf16")
    return Resolved("float16", "the GPU has no bf16 instructions")


def _portable(config: EngineConfig, device: Device) -> Resolved:
    if device.is_gpu:
        raise CannotRun("--bits portable: a GPU's bits are a class of their own", "--device cpu has portable ones")
    if config.dtype not in ("auto", "float32"):
        raise CannotRun(f"--bits portable --dtype {config.dtype}: portable bits are of float32", "leave --dtype out")
    return Resolved("float32", "portable bits were asked for")


def _cpu_dtype(model: ModelConfig, device: Device) -> Resolved:
    if device.has_bf16:
        return Resolved("bfloat16", "the processor multiplies bf16")
    if packed_bytes(model, "float32") >= device.total / 2:
        return Resolved("bfloat16", "fp32 would take more than half of the memory")
    kept = ", with weights kept in 16 bits" if kept_in_16_bits(model, "float32") else ""
    return Resolved("float32", f"the processor has no bf16 instructions, fp32 is faster{kept}")


def with_kv(config: EngineConfig, model: ModelConfig, dtype: str) -> EngineConfig:
    """The settings, with the type of the KV cache that ``auto`` stands for where fp32 was chosen, not asked for: 16
    bits, if the weights have no more. Raises CannotRun for a type that fits no kernel."""
    if config.kv_dtype == "bfloat16" and dtype == "float16":
        raise CannotRun("--kv-dtype bfloat16: the engine computes in float16", "leave --kv-dtype out")
    files = model.quantization is not None and not model.quantization.is_on_the_fly
    chosen = dtype == "float32" and config.dtype == "auto" and (files or kept_in_16_bits(model, dtype))
    latent = any(isinstance(one, MLA) for one in model.stack.attentions)
    if not chosen or latent or config.kv_dtype != "auto" or kv_kind(model, "auto") != "auto":
        return config
    return structs.replace(config, kv_dtype="bfloat16")


def choose_activations(config: EngineConfig, model: ModelConfig, device: Device) -> Resolved:
    """``auto``: int8 if the weights have 4 bits and there are kernels for it (docs/quantization.md has costs and
    gains)."""
    bits = _rounded_bits(model)
    against = _against_rounding(bits, device)
    if config.activations == "int8" and against:
        raise CannotRun(f"--activations int8: {against}", "leave --activations out")
    if config.activations != "auto":
        return Resolved(config.activations, "asked for")
    if against or 4 not in bits:
        return Resolved("model", against or "rounding them would cost more accuracy than 8-bit weights do")
    return Resolved("int8", "weights of 4 bits are multiplied as whole numbers")


def _rounded_bits(model: ModelConfig) -> set[int]:
    """Bit widths of the weights that have int8 kernels: integers, in whole groups of activations."""
    if (found := model.quantization) is None:
        return set()
    schemes = (found.scheme(module, inner) for module, inner, _ in matrices(model) if inner % GROUP == 0)
    return {each.bits for each in schemes if each is not None and (each.e2m1 or not each.floats)}


def _against_rounding(bits: set[int], device: Device) -> str:
    """Why activations cannot be rounded; "" if they can."""
    if device.is_gpu:
        return "there are kernels for rounded activations for a CPU alone"
    if not Processor.here().multiplies_bytes:
        return "the processor has none of the instructions that multiply bytes (AVX2, AVX-VNNI, AVX512-VNNI)"
    if not bits:
        return "no weights are whole numbers (int8, int4, GGUF's types) in rows of a multiple of 32"
    return ""
