"""Drafters for a model made on the device: the bundled ones embedded beside their target, and a published head's shape
with random weights, which costs what a trained one costs and guesses nothing.

The bundled heads keep their vocabulary of 4,096 as a draft vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from bench.gpu.device import Device
from bench.gpu.models import BUNDLED, sizes_of
from bench.gpu.shapes import EagleShape, ModelShape
from bench.inflate import Shape, read_tensors
from bench.inflate_heads import HeadInflation
from foresay.verifier.heads.eagle import EagleHead
from foresay.verifier.heads.eagle_config import EagleConfig
from foresay.verifier.heads.eagle_weights import EagleWeights
from foresay.verifier.heads.layer import LayerWeights
from foresay.verifier.heads.medusa import MedusaHead, MedusaHeads
from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.decoder import Decoder
from foresay.verifier.model.linear import Linear

PROJECTIONS = tuple(f"self_attn.{name}_proj" for name in "qkvo")
#: The target's layers whose inputs the bundled head reads; those of the embedded target are the same.
BUNDLED_LAYERS = (2, 4, 7)
NORMS = ("input_layernorm", "hidden_norm", "norm")


def random_eagle(device: Device, target: Decoder, shape: EagleShape) -> EagleHead:
    """An EAGLE-3 head of this shape whose weights are random, its draft vocabulary the first tokens of the target's."""
    sizes = Shape(1, shape.hidden, shape.heads, shape.kv_heads, shape.inner)
    heads, groups = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    hidden, inner = shape.hidden, shape.inner
    widths: dict[str, tuple[int, ...]] = {
        "fc": (hidden, shape.features * target.config.hidden_size),
        "lm_head": (shape.draft_vocab, hidden),
        "midlayer.self_attn.q_proj": (heads, 2 * hidden),
        "midlayer.self_attn.k_proj": (groups, 2 * hidden),
        "midlayer.self_attn.v_proj": (groups, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, heads),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
    }
    tensors = {
        f"{name}.weight": torch.randn(width, device=device.torch).mul_(0.02).to(device.dtype)
        for name, width in widths.items()
    }
    for name in ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"):
        tensors[f"{name}.weight"] = torch.ones(hidden, device=device.torch, dtype=device.dtype)
    depth = target.config.num_layers
    layers = (2, depth // 2, depth - 3)[: shape.features]
    return _eagle(tensors, target, sizes, shape.head_dim, shape.draft_vocab, layers)


def bundled_eagle(device: Device, target: Decoder, shape: ModelShape) -> EagleHead:
    """The bundled EAGLE-3 head, guessing what it guesses, as wide as ``target``, which was made of the bundled one."""
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
    def of(name: str) -> Tensor:
        return tensors[f"midlayer.{name}.weight"]

    source = ModelConfig.from_directory(BUNDLED / "target")
    layer = ModelShape("eagle3", sizes, head_dim, target.config.vocab_size).config(source, target.max_positions)
    weights = EagleWeights(
        embed=target.embedding,
        fc=tensors["fc.weight"],
        fc_bias=None,
        layers=(
            LayerWeights(
                qkv=torch.cat([of(name) for name in PROJECTIONS[:3]]),
                qkv_bias=None,
                o=of(PROJECTIONS[3]),
                o_bias=None,
                gate_up=torch.cat([of("mlp.gate_proj"), of("mlp.up_proj")]),
                down=of("mlp.down_proj"),
                norms={"post_attention_layernorm": of("post_attention_layernorm")},
            ),
        ),
        head=Linear(tensors["lm_head.weight"]),
        norms={name: tensors["norm.weight"] if name == "norm" else of(name) for name in NORMS},
        token_ids=torch.arange(vocab, device=target.embedding.device),
    )
    return EagleHead(EagleConfig(3, layer, vocab, layers), weights, target.max_positions)


def bundled_medusa(device: Device, target: Decoder, shape: ModelShape) -> MedusaHeads:
    """The bundled Medusa heads beside ``target``, which was made of the bundled one."""
    source = ModelConfig.from_directory(BUNDLED / "target")
    stored = {name: tensor.float() for name, tensor in read_tensors(BUNDLED / "medusa").items()}
    inflation = HeadInflation(sizes_of(source), shape.sizes, 1, source.vocab_size, seed=2, device=device.torch)
    tensors = {name: tensor.to(device.torch, device.dtype) for name, tensor in inflation.medusa(stored)}
    count = len({name.split(".")[0] for name in tensors})
    heads = [
        MedusaHead(
            (Linear(tensors[f"{head}.0.linear.weight"], tensors[f"{head}.0.linear.bias"]),),
            Linear(tensors[f"{head}.1.weight"]),
        )
        for head in range(count)
    ]
    return MedusaHeads(heads, torch.arange(source.vocab_size, device=target.embedding.device))
