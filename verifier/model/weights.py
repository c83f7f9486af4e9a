"""A checkpoint's tensors, read into the fused tensors of the decoder.

    q_proj [Hq D, H] ┐                gate_proj [I, H] ┐
    k_proj [Hk D, H] ├ qkv                             ├ gate_up
    v_proj [Hk D, H] ┘                  up_proj [I, H] ┘

If a family's files already have one of these fused, it is used as it is. The fused tensors are allocated once; every
tensor of a file is some rows of one of them, a view, and is copied (and cast) directly there from the mapped file, also
onto a GPU, so that there is never a second copy of the model on either side. Where a CPU computes in fp32, 16-bit
matrices stay as they are stored (:mod:`foresay.verifier.model.linear`). A quantised matrix has integers and scales:
from the files (:mod:`foresay.verifier.model.weight_loader`), or computed from each float tensor as it is read.
Names, shapes and types are checked against the files' headers before the first byte is read.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from foresay.verifier.model import expert_offload
from foresay.verifier.model.checkpoint import FLOATS, Checkpoint
from foresay.verifier.model.config import FINAL_NORM, ModelConfig
from foresay.verifier.model.errors import WeightsError
from foresay.verifier.model.layers import Attention
from foresay.verifier.model.linear import Matrix
from foresay.verifier.model.per_layer import TABLE
from foresay.verifier.model.portable_math import exp
from foresay.verifier.model.products import Product, Stacked, Vector
from foresay.verifier.model.quantization import HEAD, Format, Scheme
from foresay.verifier.model.recurrences import DECAYS
from foresay.verifier.model.weight_loader import Mismatch, TensorSlot, WeightAllocator, put, stack_slots, stored
from foresay.verifier.ops.kernels.cpu import huge_pages
from foresay.verifier.ops.quantized import QuantizedMatrix

#: Called with the share that has been read, from 0 to 1.
Progress = Callable[[float], None]

#: Where a device reads a table: in its own memory, in page-locked memory of the host, or nowhere: the file keeps it.
Where = Literal["here", "host", "file"]
#: What a CPU's kernels read.
_READ = (torch.float32, torch.bfloat16, torch.float16)
#: The largest number of fp16; and rows of a table that are looked at together.
_LARGEST, _ROWS = 65504.0, 4096
EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(slots=True)
class LayerWeights:
    """One layer. matrices: of its products (:func:`foresay.verifier.model.config.products`), by name, [out, in], with
    the rows of their modules stacked. biases: of those that have one. vectors: the rest, by their names in
    checkpoints."""

    matrices: dict[str, Matrix]
    biases: dict[str, Tensor]
    vectors: dict[str, Tensor]


@dataclass(slots=True)
class ModelWeights:
    """All weights of a decoder on one device, in one dtype except for matrices that stay as they are stored.

    embed: (V, H).  final_norm: (H,) each, by name.  lm_head: (V, H), the same tensor as ``embed`` if they are tied; for
    a draft model only the rows of the target's tokens. A head that is quantised on loading is not tied. outside: the
    common part of embeddings that layers have of their own; table: of these, a mapped file's on a CPU.
    """

    embed: Tensor
    layers: list[LayerWeights]
    final_norm: dict[str, Tensor]
    lm_head: Matrix
    outside: LayerWeights = field(default_factory=lambda: LayerWeights({}, {}, {}))
    table: Tensor | None = None


def load(
    directory: str | Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    away: Container[int] = (),
    table: Where = "here",
) -> ModelWeights:
    """The weights in ``directory``, for computing in ``dtype``, on ``device``. away: numbers of layers whose experts
    are read to the CPU instead. table: where a table of embeddings per layer will be read.

    Raises WeightsError, which names tensor and file, unless every tensor that the configuration needs is there exactly
    once with the right shape, and no unknown ones are.
    """
    checkpoint = Checkpoint.open(Path(directory)).without(unused_tensors(config))
    weights = allocate(config, dtype, device, _of_matrices(checkpoint, dtype, torch.device(device)), away)
    fitting = _fitting(checkpoint, config, weights)
    _read(checkpoint, fitting, progress or (lambda share: None), fp16=dtype is torch.float16)
    if weights.table is not None:
        weights.table = None if table == "file" else _placed(weights.table, dtype, torch.device(device), table)
    if config.tie_word_embeddings:
        _check_tied(checkpoint, weights.embed)
    if checkpoint.gguf is None:
        make_whole(config, weights)
    return weights


def table_of(directory: str | Path, config: ModelConfig, dtype: torch.dtype) -> Tensor | None:
    """The table of embeddings that layers have of their own, as :func:`load` reads it for a CPU; None if they have
    none."""
    if config.stack.embedding is None:
        return None
    checkpoint = Checkpoint.open(Path(directory))
    found = checkpoint.opened(checkpoint.tensors[TABLE].file).get_tensor(TABLE)
    return _placed(found, dtype, torch.device("cpu"), "here")


def _placed(table: Matrix, dtype: torch.dtype, device: torch.device, where: Where) -> Tensor:
    """A table where it is read. A CPU reads the file's numbers, of any float type; rows are rounded then. Those in few
    bits become floats of ``dtype``."""
    if not isinstance(table, Tensor):
        table = _floats_of(table, dtype)
    if dtype is torch.float16 and any(bool((part.abs() > _LARGEST).any()) for part in table.split(_ROWS)):
        raise WeightsError(f"{TABLE} does not fit float16; load it as bfloat16 or float32")
    if device.type == "cpu" and table.dtype in _READ:
        huge_pages.advise_rows(table)
        return table
    if where == "here":
        return table.to(device, dtype)
    room = expert_offload.page_locked(table.numel() * dtype.itemsize).view(dtype).view(table.shape)
    return room.copy_(table)


def _floats_of(table: QuantizedMatrix, dtype: torch.dtype) -> Tensor:
    """Some rows at a time: all of them take several times as much while they become floats."""
    made, whole, rest = torch.empty(table.shape, dtype=dtype), len(table.values) // _ROWS, len(table.values) % _ROWS
    parts = table.split_with_sizes([_ROWS] * whole + [rest] * (rest > 0))
    for rows, part in zip(made.split(_ROWS), parts, strict=True):
        rows.copy_(part.plain())
    return made


def make_whole(config: ModelConfig, weights: ModelWeights) -> None:
    """Convert values that GGUF files store as they are, and others minus one, or as the logarithm of the negated
    value."""
    for name, into in destinations(config, weights):
        if name in config.less_one and isinstance(into, Tensor):
            into.add_(1.0)
        if name.endswith(DECAYS) and isinstance(into, Tensor):
            into.copy_(torch.tensor([-exp(x) for x in into.flatten().tolist()]).view_as(into))


def _of_matrices(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of matrices: as stored if a CPU computes in fp32, else ``dtype``."""
    stored = {tensor.dtype for tensor in checkpoint.tensors.values() if len(tensor.shape) == 2}
    if dtype is not torch.float32 or device.type != "cpu" or len(stored) != 1:
        return dtype
    return {"BF16": torch.bfloat16, "F16": torch.float16}.get(stored.pop(), dtype)


def check(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Raise the WeightsError that :func:`load` would raise, from the headers only; no weight is read."""
    _fitting(checkpoint.without(unused_tensors(config)), config, allocate(config, torch.bfloat16, "meta"))


def slots(config: ModelConfig, weights: ModelWeights, there: Container[str]) -> dict[str, TensorSlot]:
    """Where each tensor of files goes, by name. there: the names in files."""
    stacks = list(stacked(config, weights, there))
    inside = {name for _, _, _, turns in stacks for names in turns for name in names}
    return {
        each: into
        for name, matrix in destinations(config, weights)
        if name not in inside
        for each, into in stored(name, matrix, _scheme_of(config, name, matrix), there)
    } | stack_slots(stacks, config, there)


def _fitting(checkpoint: Checkpoint, config: ModelConfig, weights: ModelWeights) -> dict[str, TensorSlot]:
    """Where each tensor goes, after checking that all are there with the right shapes."""
    found = slots(config, weights, checkpoint.tensors)
    if (own := config.stack.embedding) is not None:
        found[TABLE] = TensorSlot(own.table(config.num_layers), FLOATS, partial(_hold, weights))
    expected = {name: (into.shape, into.kinds) for name, into in found.items()}
    tied = {LM_HEAD: (tuple(weights.lm_head.shape), FLOATS)} if config.tie_word_embeddings else {}
    checkpoint.check(expected, tied)
    if config.tie_word_embeddings and weights.lm_head is not weights.embed:
        head, embed = weights.lm_head, weights.embed

        def put_both(found: Matrix) -> Tensor | None:
            put(head, found)
            return put(embed, found)

        found[EMBEDDING] = TensorSlot(tuple(embed.shape), FLOATS, put_both)
    return found


def _hold(weights: ModelWeights, table: Tensor) -> Tensor | None:
    weights.table = table
    return None


def unused_tensors(config: ModelConfig) -> tuple[str, ...]:
    """The beginnings of the names of tensors that files may have, and that nothing reads."""
    inside = ((number, layer.mixer) for number, layer in enumerate(config.stack.layers))
    found = ((number, own.unused) for number, own in inside if isinstance(own, Attention))
    return tuple(f"model.layers.{number}.{module}." for number, modules in found for module in modules)


def _scheme_of(config: ModelConfig, name: str, matrix: Matrix) -> Scheme | None:
    """How the matrix with this name is stored; None for floats."""
    if isinstance(matrix, Tensor) or config.quantization is None:
        return None
    return config.quantization.scheme(name.removesuffix(".weight"), matrix.shape[1])


def allocate(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    matrices: torch.dtype | None = None,
    away: Container[int] = (),
) -> ModelWeights:
    """Uninitialised weights with the shapes of ``config``. matrices: their dtype, except for the embedding. away: see
    :func:`load`."""

    rooms = WeightAllocator(config, dtype, matrices or dtype, torch.device(device))
    stack, hidden = config.stack, config.hidden_size
    embed = torch.empty(config.vocab_size if stack.whole else 0, hidden, dtype=dtype, device=device)
    own, last = stack.parameters(hidden), tuple(stack.norm.vectors(FINAL_NORM, hidden) if stack.whole else ())
    inside = ((layer.products(hidden), layer.vectors(hidden)) for layer in stack.layers)
    return ModelWeights(
        embed=embed,
        layers=[_allocate_part(rooms, *each, f"model.layers.{n}.", n in away) for n, each in enumerate(inside)],
        final_norm=_allocate_part(rooms, (), last).vectors,
        lm_head=_allocate_head(config, rooms, embed) if stack.whole else embed,
        outside=_allocate_part(rooms, own.products, own.vectors),
    )


def _allocate_head(config: ModelConfig, rooms: WeightAllocator, embed: Tensor) -> Matrix:
    """A tied head is the embedding, unless it is to be quantised from it."""
    apart = config.quantization is not None and config.quantization.with_head
    if config.tie_word_embeddings and not (apart and rooms.scheme((HEAD,), embed.shape[1])):
        return embed
    return rooms.matrix(len(embed), embed.shape[1], HEAD)


def _allocate_part(
    rooms: WeightAllocator, products: Iterable[Product], vectors: Iterable[Vector], prefix: str = "", away: bool = False
) -> LayerWeights:
    """A layer's, or those outside."""
    matrices, biases = dict[str, Matrix](), dict[str, Tensor]()
    of_experts = replace(rooms, device=torch.device("cpu")) if away else rooms
    for product in products:
        modules = (f"{prefix}{module}" for module in product.rows)
        matrices[product.name] = (of_experts if product.experts else rooms).matrix(
            product.outer, product.inner, *modules
        )
        if product.bias:
            biases[product.name] = rooms.vector((product.outer,))
    return LayerWeights(matrices, biases, {each.name: rooms.vector(each.shape, each.wide) for each in vectors})


def destinations(config: ModelConfig, weights: ModelWeights) -> Iterator[tuple[str, Matrix]]:
    """Every tensor name that a checkpoint must have, and the view of the fused weights that it is copied into."""
    hidden, stack = config.hidden_size, config.stack
    if stack.whole:
        yield EMBEDDING, weights.embed
    yield from weights.final_norm.items()
    yield from _destinations(stack.parameters(hidden).products, weights.outside)
    if stack.whole and not config.tie_word_embeddings:
        yield LM_HEAD, weights.lm_head
    for number, (layer, held) in enumerate(zip(stack.layers, weights.layers, strict=True)):
        for name, into in _destinations(layer.products(hidden), held):
            yield f"model.layers.{number}.{name}", into


def _destinations(products: Iterable[Product], held: LayerWeights) -> Iterator[tuple[str, Matrix]]:
    for product in products:
        for kind, whole in (("weight", held.matrices[product.name]), ("bias", held.biases.get(product.name))):
            if whole is not None:
                parts = whole.split_with_sizes(list(product.rows.values()))
                yield from zip((f"{module}.{kind}" for module in product.rows), parts, strict=True)
    yield from held.vectors.items()


def stacked(
    config: ModelConfig, weights: ModelWeights, there: Container[str]
) -> Iterator[tuple[str, Stacked, list[Sequence[Matrix]], list[list[str]]]]:
    """Tensors of all experts that files have instead of one for each: their layout, and for each part the slots of all
    experts, and their names if they were separate."""
    for number, (layer, held) in enumerate(zip(config.stack.layers, weights.layers, strict=True)):
        prefix = f"model.layers.{number}."
        for product in layer.products(config.hidden_size):
            names = [f"{prefix}{module}" for module in product.rows]
            for one in product.stacked:
                kinds = ("weight", "weight_packed", "qweight") if one.among is not None else ("weight",)
                is_there = any(f"{prefix}{one.name}".replace("weight", kind) in there for kind in kinds)
                if not _is_needed(config, names[0], product.inner, one, is_there):
                    continue
                kind, whole = ("bias", held.biases) if one.holds == "bias" else ("weight", held.matrices)
                parts = whole[product.name].split_with_sizes(list(product.rows.values()))
                turns = [slice(turn * product.experts, (turn + 1) * product.experts) for turn in one.turns]
                called = [[f"{name}.{kind}" for name in names[turn]] for turn in turns]
                yield f"{prefix}{one.name}", one, [parts[turn] for turn in turns], called


def _is_needed(config: ModelConfig, module: str, inner: int, one: Stacked, there: bool) -> bool:
    """Whether a tensor of all experts is read. there: whether it is in the files. Of quantised matrices in safetensors
    files only MXFP4's are stacked, and they must be."""
    scheme = None if config.quantization is None else config.quantization.scheme(module, inner)
    layout = Format.MADE if scheme is None else scheme.layout
    if one.holds in ("blocks", "scales"):
        return layout == Format.MXFP4
    return there and (one.holds == "bias" or layout in (Format.MADE, Format.GGUF))


@torch.no_grad()
def _read(checkpoint: Checkpoint, destinations: dict[str, TensorSlot], progress: Progress, fp16: bool) -> None:
    """Copy each tensor of the checkpoint into its slot, one file open at a time. fp16: whether all must fit in fp16."""
    total, done = sum(checkpoint.tensors[name].nbytes for name in destinations), 0
    for file in checkpoint.files:
        tensors = checkpoint.opened(file)
        for name in filter(destinations.__contains__, tensors.offset_keys()):
            _put(destinations[name], tensors.get_tensor(name), f"{file}: {name}", fp16)
            done += checkpoint.tensors[name].nbytes
            progress(done / total)


def _put(into: TensorSlot, tensor: Matrix, name: str, fp16: bool) -> None:
    try:
        found = into.put(tensor)
    except Mismatch as error:
        raise WeightsError(f"{name} {error}") from error
    if fp16 and isinstance(found, Tensor) and not found.isfinite().all():
        raise WeightsError(f"{name} does not fit float16; load it as bfloat16 or float32")


def _check_tied(checkpoint: Checkpoint, embed: Tensor) -> None:
    """A stored head that is tied to the embedding must be equal to it."""
    if LM_HEAD not in checkpoint.tensors:
        return
    file = checkpoint.tensors[LM_HEAD].file
    tensors = checkpoint.opened(file)
    rows = zip(tensors.get_tensor(LM_HEAD).chunk(16), embed.chunk(16), strict=True)
    if not all(torch.equal(stored.to(kept.dtype), kept.cpu()) for stored, kept in rows):
        raise WeightsError(f"{file}: {LM_HEAD} differs from {EMBEDDING}, to which config.json ties it")
