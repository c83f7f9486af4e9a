"""Large models made on the device out of the bundled ones, with the costs of the large shape and the output of the
small model; and heads for them.

No file is written and no second copy exists: each tensor is sampled where it is multiplied, the small model's numbers
are put into it (:mod:`bench.inflate`), and the weights are allocated as those of a loaded checkpoint. A head of a
published shape has random weights: it costs what a trained one costs, and no draft is accepted. The bundled head keeps
its vocabulary of 4,096 as a draft vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch import dtype as Dtype

import foresay.server
from bench.inflate import Inflation, Shape, read_tensors
from bench.inflate_heads import HeadInflation
from bench.shapes import POSITIONS, EagleShape, ModelShape
from foresay.kvpaging import KVStore, PagePool
from foresay.verifier.heads.config import HeadConfig
from foresay.verifier.heads.layouts import HeadTensors
from foresay.verifier.heads.paged import EagleHead
from foresay.verifier.heads.reader import weights_of
from foresay.verifier.model.config import ModelConfig, kv_shapes
from foresay.verifier.model.decoder import Decoder
from foresay.verifier.model.weights import allocate, destinations
from foresay.verifier.model_runner import ModelRunner

BUNDLED = Path(foresay.server.__file__).parent / "bundled"
#: The target's layers whose inputs the bundled head reads; those of the embedded target are the same.
BUNDLED_LAYERS = (2, 4, 7)
NORMS = ("input_layernorm", "hidden_norm", "norm")


class Device(Protocol):
    """The device that models are made on, and their dtype."""

    torch: torch.device

    @property
    def dtype(self) -> Dtype:
        """The dtype of weights and activations."""
        ...


def sizes_of(config: ModelConfig) -> Shape:
    """The source's shape, for inflation."""
    return Shape(config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads, config.intermediate_size)


def inflated(
    device: Device, shape: ModelShape, source: Path, positions: int = POSITIONS, seed: int = 0
) -> tuple[ModelConfig, Decoder]:
    """The model in ``source`` (a directory) embedded into ``shape`` on the device, in the device's dtype."""
    small = ModelConfig.from_directory(source)
    config = shape.config(small, positions)
    weights = allocate(config, device.dtype, device.torch)
    into = {name: into for name, into in destinations(config, weights) if isinstance(into, Tensor)}
    inflation = Inflation(
        sizes_of(small),
        shape.sizes,
        small.head_dim,
        shape.vocab,
        seed=seed,
        device=device.torch,
        wide=shape.head_dim,
        qk_eps=config.rms_norm_eps if shape.qk_norm else None,
        untied=shape.untied,
    )
    exact = {name: tensor.float() for name, tensor in read_tensors(source).items()}
    for name, tensor in inflation.tensors(exact):
        into.pop(name).copy_(tensor)
    assert not into, f"nothing was made for {sorted(into)}"
    return config, Decoder(config, weights, positions)


def random_model(device: Device, shape: ModelShape, positions: int = POSITIONS) -> Decoder:
    """A decoder of this shape with random weights: every layer moves every number."""
    config = shape.config(ModelConfig.from_directory(BUNDLED / "target"), positions)
    weights = allocate(config, device.dtype, device.torch)
    for _, into in destinations(config, weights):
        assert isinstance(into, Tensor), "nothing is quantised"
        into.normal_(std=0.02)
    return Decoder(config, weights, positions)


def store_for(pool: PagePool, decoder: Decoder, device: Device) -> KVStore:
    """An empty store for a decoder's keys and values."""
    return KVStore(pool, kv_shapes(decoder.config), decoder.dtype, device.torch)


def scribble(store: KVStore) -> None:
    """Random keys and values everywhere, as of long texts: a cache of zeros would hide the cost of reading it."""
    for part in store.tensors:
        part.normal_()


def paged(pool: PagePool, decoder: Decoder, device: Device) -> ModelRunner:
    """A decoder with a store on the pool."""
    return ModelRunner(decoder, store_for(pool, decoder, device), decoder.max_positions - 64)


def random_eagle(device: Device, target: Decoder, shape: EagleShape) -> EagleHead:
    """An EAGLE-3 head of this shape with random weights, whose draft vocabulary is the first tokens of the target's."""
    sizes = Shape(1, shape.hidden, shape.heads, shape.kv_heads, shape.inner)
    tensors = {
        f"{name}.weight": torch.randn(width, device=device.torch).mul_(0.02).to(device.dtype)
        for name, width in shape.matrices.items()
    }
    for name in ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"):
        tensors[f"{name}.weight"] = torch.ones(shape.hidden, device=device.torch, dtype=device.dtype)
    depth = target.config.num_layers
    layers = (2, depth // 2, depth - 3)[: shape.features]
    return _eagle(tensors, target, sizes, shape.head_dim, shape.draft_vocab, layers)


def bundled_eagle(device: Device, target: Decoder, shape: ModelShape) -> EagleHead:
    """The bundled EAGLE-3 head with the same drafts, as wide as ``target``, which was made of the bundled one."""
    source = ModelConfig.from_directory(BUNDLED / "target")
    small, sizes = replace(sizes_of(source), layers=1), replace(shape.sizes, layers=1)
    stored = {name: tensor.float() for name, tensor in read_tensors(BUNDLED / "eagle3").items()}
    inflation = HeadInflation(
        small, sizes, source.head_dim, shape.vocab, seed=1, device=device.torch, wide=shape.head_dim
    )
    tensors = {
        name: tensor.to(device.torch, device.dtype if tensor.is_floating_point() else None)
        for name, tensor in inflation.eagle(stored)
    }
    return _eagle(tensors, target, sizes, shape.head_dim, source.vocab_size, BUNDLED_LAYERS)


def _eagle(
    tensors: dict[str, Tensor], target: Decoder, sizes: Shape, head_dim: int, vocab: int, layers: tuple[int, ...]
) -> EagleHead:
    source = ModelConfig.from_directory(BUNDLED / "target")
    layer = ModelShape("eagle3", sizes, head_dim, target.config.vocab_size).config(source, target.max_positions)
    names = tuple(f"layer.{number}" for number in layers)
    config = HeadConfig(layer=replace(layer, tie_word_embeddings=False), draft_vocab=vocab, names=names)
    own = {**tensors, "d2t": torch.zeros(vocab, dtype=torch.int64)}
    own.pop("t2d", None)
    return EagleHead(config, weights_of(HeadTensors(own, "made"), config, target), target.max_positions)
