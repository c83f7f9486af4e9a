"""Random heads for a target, written as each of the published layouts has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.heads.plain import PlainEagle, Weights
from verifier.model.decoder import Decoder

#: Layouts of Medusa heads and of EAGLE heads.
MEDUSA = ["authors", "pickle", "medusa2", "tied_output", "vllm", "vllm_truncated", "vllm_shared"]
EAGLE = ["safeailab", "specforge", "speculators", "speculators_norms", "wide_vocab", "eagle1", "eagle1_pickle"]
BLOCKS = 2


def noise(generator: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=generator).mul_(scale / shape[-1] ** 0.5)


def write_config(directory: Path, config: dict[str, Any]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))


def contiguous(weights: Weights) -> Weights:
    return {name: tensor.clone().contiguous() for name, tensor in weights.items()}


def make_medusa(directory: Path, target: Decoder, layout: str, heads: int = 3) -> tuple[Weights, Tensor | None]:
    """Write the heads; returns them in the authors' names and the truncated vocabulary, if there is one.

    The weights returned have an output matrix for every head and only the rows that count.
    """
    generator = torch.Generator().manual_seed(7)
    width, vocab = target.config.hidden_size, target.config.vocab_size
    plain: Weights = {}
    for head in range(heads):
        for block in range(BLOCKS):
            plain[f"{head}.{block}.linear.weight"] = noise(generator, width, width)
            plain[f"{head}.{block}.linear.bias"] = noise(generator, width)
        plain[f"{head}.{BLOCKS}.weight"] = noise(generator, vocab, width, scale=2.5)
    if layout.startswith("vllm"):
        return _write_vllm(directory, plain, layout, heads, vocab, width)
    config = {
        "medusa_num_heads": 2,  # wrong, as in the published files
        "medusa_num_layers": BLOCKS,
        "base_model_name_or_path": "someone/target",
    }
    write_config(directory, config)
    stored = dict(plain)
    if layout == "tied_output":
        matrix = _matrix(target)
        for head in range(heads):
            del stored[f"{head}.{BLOCKS}.weight"]
            plain[f"{head}.{BLOCKS}.weight"] = matrix
    if layout == "medusa2":
        stored = {f"medusa_head.{name}": tensor for name, tensor in stored.items()}
    if layout == "pickle":
        torch.save(stored, directory / "medusa_lm_head.pt")
    else:
        save_file(contiguous(stored), directory / "medusa_lm_head.safetensors")
    return plain, None


def _matrix(target: Decoder) -> Tensor:
    """The target's output head as a matrix: what it makes of the unit vectors."""
    rows: Tensor = target.head(torch.eye(target.config.hidden_size, dtype=target.dtype)).float()
    return rows.T.contiguous()


def _write_vllm(
    directory: Path, plain: Weights, layout: str, heads: int, vocab: int, width: int
) -> tuple[Weights, Tensor | None]:
    config: dict[str, Any] = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": width,
        "vocab_size": vocab,
        "num_heads": heads,
        "num_hidden_layers": BLOCKS,
        "medusa_fc_bias": True,
        "truncated_vocab_size": vocab,
        "original_lm_head": layout == "vllm_shared",
    }
    token_map, stored = None, {}
    if layout == "vllm_truncated":
        token_map = torch.arange(3, vocab, 4)
        config["truncated_vocab_size"] = len(token_map)
        stored["token_map"] = token_map
    for name, tensor in plain.items():
        number, block, *rest = name.split(".")
        if rest == ["weight"]:
            if layout != "vllm_shared" or number == "0":
                stored[f"medusa_heads.lm_heads.{number}.weight"] = tensor
        else:
            stored[f"medusa_heads.blocks.{number}.layers.{block}.{rest[1]}"] = tensor
    for head in range(heads):
        name = f"{head}.{BLOCKS}.weight"
        plain[name] = plain[f"0.{BLOCKS}.weight"] if layout == "vllm_shared" else plain[name]
        plain[name] = plain[name] if token_map is None else plain[name][token_map]
    write_config(directory, config)
    save_file(contiguous(stored), directory / "model.safetensors")
    return plain, token_map


def make_eagle(directory: Path, target: Decoder, layout: str, layers: list[int] | None = None) -> PlainEagle:
    """Write the head; returns the same in plain torch. layers: target layers whose inputs it reads."""
    generator = torch.Generator().manual_seed(11)
    vocab, width = target.config.vocab_size, target.config.hidden_size
    generation = 1 if layout.startswith("eagle1") else 3
    layer = {
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": width // 4,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
    }
    flags = {"speculators_norms": {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}}.get(
        layout, {}
    )
    if layout == "specforge":
        flags = {"fc_norm": True}
    draft = vocab if layout == "wide_vocab" or generation == 1 else vocab // 2
    weights = _eagle_weights(generator, layer, len(layers or []) or 3, generation, flags)
    lm_head = _matrix(target) if generation == 1 else noise(generator, draft, width, scale=2.5)
    stored = dict(weights)
    if generation == 3:
        stored["lm_head.weight"] = lm_head
    if draft < vocab:
        ids = torch.randperm(vocab, generator=generator)[:draft].sort().values
        stored["d2t"] = ids - torch.arange(draft)
        stored["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
    embed = target.embedding
    if layout == "speculators_norms":
        embed = stored["embed_tokens.weight"] = noise(generator, vocab, width, scale=2.5)
    _write_eagle(directory, layout, layer, stored, draft, flags, layers)
    return PlainEagle(layer, weights, embed, lm_head, generation, flags)


def draft_ids(directory: Path) -> Tensor | None:
    """The target's ids of the draft vocabulary, read from the file."""
    from safetensors.torch import load_file

    stored = load_file(directory / "model.safetensors") if (directory / "model.safetensors").exists() else {}
    return torch.arange(len(stored["d2t"])) + stored["d2t"] if "d2t" in stored else None


def _eagle_weights(
    generator: torch.Generator, layer: dict[str, Any], features: int, generation: int, flags: dict[str, bool]
) -> Weights:
    width, inner, dim = layer["hidden_size"], layer["intermediate_size"], layer["head_dim"]
    read = 2 * width if generation == 3 else width
    shapes = {
        "fc.weight": (width, features * width if generation == 3 else 2 * width),
        "self_attn.q_proj.weight": (4 * dim, read),
        "self_attn.k_proj.weight": (2 * dim, read),
        "self_attn.v_proj.weight": (2 * dim, read),
        "self_attn.o_proj.weight": (width, 4 * dim),
        "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
    }
    weights = {name: noise(generator, *shape, scale=1.5) for name, shape in shapes.items()}
    if generation == 1:
        weights["fc.bias"] = 0.3 * noise(generator, width)
    norms = {"post_attention_layernorm": width}
    if generation == 3:
        norms |= {"input_layernorm": width, "hidden_norm": width, "norm": width}
    if flags.get("norm_before_fc"):
        norms["input_norm"] = features * width
    if flags.get("fc_norm"):
        norms |= {f"fc_norm.{index}": width for index in range(features)}
    for name, size in norms.items():
        weights[f"{name}.weight"] = 1 + 0.2 * torch.randn(size, generator=generator)
    return weights


_OUTSIDE = ("fc", "norm.", "lm_head", "d2t", "t2d", "embed_tokens", "input_norm")


def _write_eagle(
    directory: Path,
    layout: str,
    layer: dict[str, Any],
    stored: Weights,
    draft: int,
    flags: dict[str, bool],
    layers: list[int] | None,
) -> None:
    prefix = "midlayer." if layout in ("safeailab", "specforge", "wide_vocab") else "layers.0."
    named = {(name if name.startswith(_OUTSIDE) else prefix + name): tensor for name, tensor in stored.items()}
    chosen = {"eagle_aux_hidden_state_layer_ids": layers} if layers else {}
    if layout.startswith("speculators"):
        nested = {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"], "draft_vocab_size": draft}
        write_config(directory, {**nested, "transformer_layer_config": layer, **flags, **chosen})
    elif layout == "specforge":
        config = {**layer, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": draft, **flags}
        write_config(directory, {**config, "eagle_config": {"use_aux_hidden_state": True, **chosen}})
    elif layout.startswith("eagle1"):
        write_config(directory, {**layer, "architectures": ["LlamaForCausalLM"]})
    else:
        config = {**layer, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": draft}
        write_config(directory, {**config, **chosen})
    if layout == "eagle1_pickle":
        torch.save(named, directory / "pytorch_model.bin")
    else:
        save_file(contiguous(named), directory / "model.safetensors")
