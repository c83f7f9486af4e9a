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
from bench.shapes import POSITIONS, DFlashShape, EagleShape, ModelShape
from foresay.kvpaging import KVStore, PagePool
from foresay.server.engine.parameters import quantized
from foresay.verifier.heads.config import HeadConfig, continued
from foresay.verifier.heads.layouts import HeadTensors
from foresay.verifier.heads.paged import DFlashHead, EagleHead
from foresay.verifier.heads.reader import weights_of
from foresay.verifier.model.config import ModelConfig, kv_shapes
from foresay.verifier.model.decoder import Decoder
from foresay.verifier.model.layers import Stack
from foresay.verifier.model.linear import Linear
from foresay.verifier.model.recurrences import DECAYS
from foresay.verifier.model.save_quantized import int8_parts
from foresay.verifier.model.weights import allocate, destinations
from foresay.verifier.model_runner import ModelRunner
from foresay.verifier.ops.quantized import E8M0, QuantizedMatrix

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


def random_model(device: Device, shape: ModelShape, positions: int = POSITIONS, quantize: str | None = None) -> Decoder:
    """A decoder of this shape with random weights. quantize: as the flag of this name."""
    config = shape.config(ModelConfig.from_directory(BUNDLED / "target"), positions)
    return random_decoder(device, config if quantize is None else quantized(config, quantize, "quantize"), positions)


def random_decoder(device: Device, config: ModelConfig, positions: int = POSITIONS) -> Decoder:
    """A decoder with random weights: every layer moves every number."""
    weights = allocate(config, device.dtype, device.torch)
    for name, into in destinations(config, weights):
        if isinstance(into, QuantizedMatrix):
            _scribble_bits(into)
        elif into.dim() == 1:
            into.uniform_(0.5, 1.5).mul_(-1 if name.endswith(DECAYS) else 1)
        else:
            into.normal_(std=into.shape[-1] ** -0.5)
    return Decoder(config, weights, positions)


def _scribble_bits(into: QuantizedMatrix) -> None:
    """Any numbers, with scales at which rows keep their size."""
    into.values.view(torch.uint8).random_()
    if into.scales.dtype is E8M0:
        into.scales.view(torch.uint8).fill_(120)
    else:
        into.scales.fill_(into.inner**-0.5 / 2 ** (into.bits - 2))


def bytes_read(decoder: Decoder, rows: int = 1) -> float:
    """Bytes of weights that a pass of so many rows reads: of a mixture those of the experts that as many rows wake,
    each choosing at random; without routers."""
    shares = dict[Linear, float]()
    for layer in decoder.layers:
        if layer.experts is not None:
            how = layer.experts.routing
            shares |= dict.fromkeys(layer.feed_forward, 1 - (1 - how.top_k / how.experts) ** rows)
    return sum(each.nbytes * shares.get(each, 1.0) for each in decoder.linears)


def head_bytes_read(head: EagleHead | DFlashHead, passes: int) -> float:
    """The same of a head's passes, and of the matrix that mixes features once."""
    return (0 if head._fc is None else head._fc.nbytes) + passes * sum(each.nbytes for each in head.decoder.linears)


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


def random_dflash(device: Device, target: Decoder, shape: DFlashShape) -> DFlashHead:
    """A DFlash head of this shape with random weights, in z-lab's layout; it shares the target's embedding and output
    matrix."""
    own, depth = target.config, target.config.num_layers
    stack = Stack.uniform(shape.layers, replace(own.first.attention, causal=False), shape.inner, own.stack.norm)
    layer = replace(own, stack=stack)
    read = (1 + round(number * (depth - 4) / (shape.layers - 1)) for number in range(shape.layers))
    config = HeadConfig(
        layer=layer, draft_vocab=own.vocab_size, names=tuple(f"layer.{number + 1}" for number in read), generation=0,
        mask=own.vocab_size - 1, guesses=shape.block - 1,
    )  # fmt: skip
    sizes: dict[str, tuple[int, ...]] = {"fc.weight": (own.hidden_size, own.hidden_size * shape.layers)}
    sizes |= {f"{name}.weight": (size,) for name, size in config.norms(own.hidden_size, ()).items()}
    for number, node in enumerate(layer.stack.layers):
        for product in node.products(own.hidden_size):
            rows = {f"{module}.weight": (outer, product.inner) for module, outer in product.rows.items()}
            sizes |= {f"layers.{number}.{name}": size for name, size in rows.items()}
        sizes |= {f"layers.{number}.{one.name}": one.shape for one in node.vectors(own.hidden_size)}
    tensors = {name: torch.randn(size, device=device.torch).mul_(0.02).to(device.dtype) for name, size in sizes.items()}
    return DFlashHead(config, weights_of(HeadTensors(tensors, "made"), config, target), target.max_positions)


def random_eagle(device: Device, target: Decoder, shape: EagleShape, int8: bool = False) -> EagleHead:
    """An EAGLE-3 head of this shape with random weights, whose draft vocabulary is the first tokens of the target's.
    int8: its matrices, in groups of 32."""
    sizes = Shape(1, shape.hidden, shape.heads, shape.kv_heads, shape.inner)
    tensors = {
        f"{name}.weight": torch.randn(width, device=device.torch).mul_(0.02).to(device.dtype)
        for name, width in shape.matrices.items()
    }
    for name in ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"):
        tensors[f"{name}.weight"] = torch.ones(shape.hidden, device=device.torch, dtype=device.dtype)
    if int8:
        tensors = {name: part for each in tensors.items() for name, part in int8_parts(*each).items()}
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
    config = HeadConfig(layer=continued(replace(layer, tie_word_embeddings=False), 3), draft_vocab=vocab, names=names)
    own = {**tensors, "d2t": torch.zeros(vocab, dtype=torch.int64)}
    own.pop("t2d", None)
    return EagleHead(config, weights_of(HeadTensors(own, "made"), config, target), target.max_positions)
