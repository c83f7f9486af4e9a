"""Large models made on the device out of the bundled ones: what a model of the shape costs, saying what those say.

No file is written and no second copy held: each tensor is sampled where it is multiplied, the small model's numbers go
into their places (:mod:`bench.inflate`), and the weights' allocation is the one that a loaded checkpoint has.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

import foresay.server
from bench.gpu.device import Device
from bench.gpu.shapes import POSITIONS, ModelShape
from bench.inflate import Inflation, Shape, read_tensors
from foresay.kvpaging import KVStore, PagePool
from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.decoder import Decoder
from foresay.verifier.model.weights import allocate, places
from foresay.verifier.paged_model import PagedModel

BUNDLED = Path(foresay.server.__file__).parent / "bundled"


def sizes_of(config: ModelConfig) -> Shape:
    """The source's shape as inflation wants it."""
    return Shape(config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads, config.intermediate_size)


def inflated(
    device: Device, shape: ModelShape, source: Path, positions: int = POSITIONS, seed: int = 0
) -> tuple[ModelConfig, Decoder]:
    """The model in ``source`` (a directory) embedded into ``shape`` on the device, in the device's dtype."""
    small = ModelConfig.from_directory(source)
    config = shape.config(small, positions)
    weights = allocate(config, device.dtype, device.torch)
    into = {name: place for name, place in places(config, weights) if isinstance(place, Tensor)}
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
    for _, place in places(config, weights):
        assert isinstance(place, Tensor), "nothing is quantised"
        place.normal_(std=0.02)
    return Decoder(config, weights, positions)


def store_for(pool: PagePool, decoder: Decoder, device: Device) -> KVStore:
    """An empty store for a decoder's keys and values."""
    config = decoder.config
    return KVStore(pool, config.num_layers, config.num_kv_heads, config.head_dim, decoder.dtype, device.torch)


def scribble(store: KVStore) -> None:
    """Random keys and values everywhere, as of long texts: a cache of zeros would hide what reading it costs."""
    store.keys.normal_()
    store.values.normal_()


def paged(pool: PagePool, decoder: Decoder, device: Device) -> PagedModel:
    """A decoder with a store on the pool."""
    return PagedModel(decoder, store_for(pool, decoder, device), decoder.max_positions - 64)
