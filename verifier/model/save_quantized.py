"""Writes a float model as a quantised one: compressed-tensors.

Every matrix is quantised separately and written to a few files, so that little of the model is in memory at once. A
tied output head is written in addition to the embedding, and no longer tied.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from foresay.verifier.model.checkpoint import INDEX, SINGLE, Checkpoint
from foresay.verifier.model.config import ModelConfig, products
from foresay.verifier.model.families import unwrapped
from foresay.verifier.model.fields import Fields
from foresay.verifier.model.linear import Matrix
from foresay.verifier.model.names import SHARED_FILES
from foresay.verifier.model.products import Stacked
from foresay.verifier.model.quantization import HEAD, Format, Scheme
from foresay.verifier.model.weight_loader import of_product, turns_of_stack
from foresay.verifier.model.weights import (
    EMBEDDING,
    LM_HEAD,
    Progress,
    allocate,
    check,
    destinations,
    stacked,
    unused_tensors,
)
from foresay.verifier.ops.quantized import QuantizedMatrix, packed

#: The most bytes of a file, unless one matrix has more.
_FILE = 4 << 30


def write(directory: Path, config: ModelConfig, out: Path, progress: Progress) -> None:
    """Write the model in ``directory`` to ``out``. config: with the quantisation to apply.

    Raises WeightsError if its files do not fit its configuration.
    """
    checkpoint = Checkpoint.open(directory).without(unused_tensors(config))
    check(checkpoint, config)
    out.mkdir(parents=True, exist_ok=True)
    weights = allocate(config, torch.bfloat16, "meta")
    matrices = {name: like for name, like in destinations(config, weights) if isinstance(like, QuantizedMatrix)}
    if isinstance(weights.lm_head, QuantizedMatrix):
        matrices[LM_HEAD] = weights.lm_head
    files, stacks = _Files(out), dict[str, list[Any]]()
    for each in stacked(config, weights, checkpoint.tensors):
        stacks.setdefault(each[0], []).append(each)
    for name, tensor in _tensors(checkpoint, config, progress):
        apart = [part for stack in stacks.get(name, ()) for part in _unstacked(stack, tensor)]
        for own, part in apart or [(name, tensor)]:
            files.add(_parts(own, part, matrices.get(own)))
    files.close()
    _write_config(directory, config, matrices, out)
    for path in (path for pattern in SHARED_FILES for path in directory.glob(pattern)):
        shutil.copy(path, out / path.name)


def _tensors(checkpoint: Checkpoint, config: ModelConfig, progress: Progress) -> Iterator[tuple[str, Tensor]]:
    """All tensors; a tied output head follows the embedding."""
    total, done = sum(tensor.nbytes for tensor in checkpoint.tensors.values()), 0
    for file in checkpoint.files:
        tensors = checkpoint.opened(file)
        for name in filter(checkpoint.tensors.__contains__, tensors.offset_keys()):
            tensor = tensors.get_tensor(name)
            if not (config.tie_word_embeddings and name == LM_HEAD):
                yield name, tensor
            if config.tie_word_embeddings and name == EMBEDDING:
                yield LM_HEAD, tensor.clone()
            done += checkpoint.tensors[name].nbytes
            progress(done / total)


def _unstacked(
    stack: tuple[str, Stacked, list[Sequence[Matrix]], list[list[str]]], tensor: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """A tensor of all experts, split by expert. stack: see :func:`foresay.verifier.model.weights.stacked`."""
    _, how, destinations, names = stack
    sizes = [int(turn[0].shape[0]) for turn in destinations]
    own = of_product(how, tensor)
    assert isinstance(own, Tensor), "files with floats are written"
    for number, one in enumerate(own):
        for turn, part in zip(names, turns_of_stack(how, one, sizes), strict=True):
            yield turn[number], part.contiguous()


def _parts(name: str, tensor: Tensor, like: Matrix | None) -> dict[str, Tensor]:
    """A tensor unchanged, or as numbers and scales. like: a tensor like it, without data."""
    if not isinstance(like, QuantizedMatrix):
        return {name: tensor}
    outer, inner = like.shape
    kind = like.bits, like.group, True, like.scales.dtype, torch.device("cpu"), like.floats
    made = QuantizedMatrix.empty(outer, inner, *kind)
    made.fill(tensor)
    scales = {f"{name}_scale": made.scales}
    if made.floats:
        return {name: made.values, **scales}
    return {f"{name}_packed": _words(made), **scales, f"{name}_shape": torch.tensor(made.shape)}


def _words(matrix: QuantizedMatrix) -> Tensor:
    """int32[O, K * bits / 32]: unsigned numbers, the first in the lowest bits."""
    numbers = matrix.numbers()
    unsigned = numbers ^ -128 if matrix.bits == 8 else numbers ^ 8
    parts = unsigned.view(torch.uint8) if matrix.bits == 8 else packed(unsigned)
    filled = torch.nn.functional.pad(parts, (0, -parts.shape[1] % 4))
    return filled.contiguous().view(torch.int32)


@dataclass
class _Files:
    """The weight files of a directory, each written when it is full."""

    out: Path
    _held: dict[str, Tensor] = field(default_factory=dict)
    _written: list[list[str]] = field(default_factory=list)
    _bytes: int = 0

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Add some tensors."""
        if self._held and sum(tensor.nbytes for tensor in (*self._held.values(), *tensors.values())) > _FILE:
            self._write()
        self._held.update(tensors)

    def close(self) -> None:
        """Write the last file, and the index."""
        self._write()
        count = len(self._written)
        names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
        for number, name in enumerate(names):
            self._temporary(number).rename(self.out / name)
        index = {tensor: name for name, tensors in zip(names, self._written, strict=True) for tensor in tensors}
        body = {"metadata": {"total_size": self._bytes}, "weight_map": index}
        (self.out / INDEX).write_text(json.dumps(body, indent=2) + "\n")

    def _write(self) -> None:
        save_file(self._held, self._temporary(len(self._written)), metadata={"format": "pt"})
        self._written.append(list(self._held))
        self._bytes += sum(tensor.nbytes for tensor in self._held.values())
        self._held = {}

    def _temporary(self, number: int) -> Path:
        return self.out / f"part-{number}.tmp"


def _write_config(directory: Path, config: ModelConfig, matrices: Iterable[str], out: Path) -> None:
    values = dict(unwrapped(Fields.read(directory / "config.json")).values)
    modules = {name.removesuffix(".weight"): _inner(config, name) for name in matrices}
    values["quantization_config"] = quantization_config(config, modules)
    if HEAD in modules:
        values["tie_word_embeddings"] = False
    (out / "config.json").write_text(json.dumps(values, indent=2) + "\n")


def _inner(config: ModelConfig, name: str) -> int:
    """Numbers of a row of the matrix of this name."""
    inner = {
        f"model.layers.{number}.{module}": product.inner
        for number, product in products(config)
        for module in product.rows
    }
    return inner.get(name.removesuffix(".weight"), config.hidden_size)


def quantization_config(config: ModelConfig, modules: Mapping[str, int]) -> dict[str, Any]:
    """The section for config.json. modules: the quantised ones, with the numbers of a row of each."""
    assert config.quantization is not None, "something is quantised"
    targets: dict[Scheme, dict[str, None]] = {}
    for module, inner in modules.items():
        scheme = config.quantization.scheme(module, inner)
        assert scheme is not None, "this module is"
        pattern = module if module == HEAD else rf"re:.*\.{module.rpartition('.')[2]}$"
        targets.setdefault(scheme, {})[pattern] = None
    groups = {f"group_{n}": _group(scheme, list(found)) for n, (scheme, found) in enumerate(targets.items())}
    floats = any(scheme.floats for scheme in targets)
    return {
        "quant_method": "compressed-tensors",
        "format": Format.FLOATS8 if floats else Format.PACKED,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [] if HEAD in modules else [HEAD],
    }


def _group(scheme: Scheme, targets: list[str]) -> dict[str, Any]:
    weights = {
        "num_bits": scheme.bits,
        "type": "float" if scheme.floats else "int",
        "symmetric": True,
        "strategy": "group" if scheme.group else "channel",
        "dynamic": False,
    }
    if scheme.group:
        weights["group_size"] = scheme.group
    return {"targets": targets, "weights": weights, "input_activations": None, "output_activations": None}


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file. If that fails, raises OSError or RuntimeError, and leaves a partial file."""
    whole = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(whole, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise RuntimeError(str(error)) from error


_GROUP = 32


def write_int8(tensors: Mapping[str, Tensor], values: Mapping[str, Any], out: Path) -> None:
    """Write float tensors (a head's) with all matrices in int8, with a scale for each group of 32 numbers: the layout
    ``int-quantized``. values: of their config.json."""
    out.mkdir(parents=True, exist_ok=True)
    parts = (int8_parts(name, tensor) for name, tensor in tensors.items())
    save_tensors(out / SINGLE, {name: part for each in parts for name, part in each.items()})
    scheme: dict[str, Any] = {"quant_method": "compressed-tensors", "format": Format.INTEGERS}
    scheme |= {"config_groups": {"group_0": _group(Scheme(8, _GROUP, True, Format.INTEGERS), ["Linear"])}}
    (out / "config.json").write_text(json.dumps({**values, "quantization_config": scheme}, indent=2) + "\n")


def int8_parts(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A tensor unchanged, or the numbers and scales of a weight matrix."""
    if tensor.dim() != 2 or not tensor.is_floating_point() or tensor.shape[1] % _GROUP or "embed" in name:
        return {name: tensor}
    outer, inner = tensor.shape
    made = QuantizedMatrix.empty(outer, inner, 8, _GROUP, True, torch.bfloat16, tensor.device)
    made.fill(tensor)
    return {name: made.values, f"{name}_scale": made.scales}
