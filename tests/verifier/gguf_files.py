"""GGUF files of the test models, written with llama.cpp's own package."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from foresay.verifier.model.checkpoint import SINGLE, Checkpoint
from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.families import FAMILIES
from foresay.verifier.model.feed_forward import MLP, Experts
from foresay.verifier.model.gguf.config import PREDICTS, theirs
from foresay.verifier.model.gguf.file import GgufFile
from foresay.verifier.model.layers import Attention
from foresay.verifier.model.mla import MLA
from foresay.verifier.model.recurrences import DECAYS, GatedDelta, Mamba2, Remembering, ShortConv
from foresay.verifier.model.rope import inverse_frequencies
from foresay.verifier.model.rope_config import (
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    ProportionalScaling,
    YarnScaling,
)
from foresay.verifier.ops.kernels.cpu import kernel_cache
from tests.verifier.families import of_heads

gguf = pytest.importorskip("gguf")

#: The type of a matrix by its name there.
TypeOf = Callable[[str], str]


def cache_of_its_own(directory: Path, patch: pytest.MonkeyPatch) -> None:
    """What is made of files goes here; compiled kernels are found where they were, not compiled again for each test."""
    (directory / "foresay").mkdir(parents=True)
    kernel_cache.directory().mkdir(mode=0o700, parents=True, exist_ok=True)
    (directory / "foresay" / "kernels").symlink_to(kernel_cache.directory())
    patch.setenv("XDG_CACHE_HOME", str(directory))


def read_only(*_: object, **__: object) -> None:
    """What changes a file in a folder that is read-only."""
    raise OSError(30, "Read-only file system")


def all_of(kind: str) -> TypeOf:
    return lambda name: kind


def q4_k_m(name: str) -> str:
    """A mix such as that of llama.cpp's quantiser: some tensors of a product have more bits than the others."""
    more = name.startswith(("token_embd", "output")) or ("attn_v" in name) or ("blk.1.ffn_down" in name)
    return "Q6_K" if more else "Q5_K" if "blk.2.ffn_up" in name else "Q4_K"


def blocks_of(weight: Tensor, kind: str, seed: int) -> tuple[np.ndarray, Tensor]:
    """A matrix as the file has it, and the floats that it stands for by the package. Of what the package cannot make
    blocks are random, their steps of the weight's size."""
    of, rows = gguf.GGMLQuantizationType[kind], weight.float().flatten(0, -2)
    raw = (
        _random_blocks(tuple(rows.shape), kind, seed)
        if kind.endswith("_K") or kind == "NVFP4"
        else gguf.quants.quantize(rows.numpy(), of)
    )
    raw = raw.reshape(*weight.shape[:-1], -1)
    return raw, torch.from_numpy(gguf.quants.dequantize(raw, of).reshape(weight.shape).copy())


#: Where steps stand in a block, and what they are about for weights of size 1 / sqrt(K).
_STEPS = {"Q4_K": ((0, 1 / 150), (2, 1 / 20)), "Q5_K": ((0, 1 / 300), (2, 1 / 20)), "Q6_K": ((208, 1 / 1000),)}


def _random_blocks(shape: tuple[int, ...], kind: str, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    numbers, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = rng.integers(0, 256, (shape[0], shape[1] // numbers, size), dtype=np.uint8)
    if kind == "NVFP4":
        raw[:, :, :4] = rng.integers(8, 16, raw[:, :, :4].shape)
    for start, step in _STEPS.get(kind, ()):
        steps = (step / shape[1] ** 0.5 * rng.uniform(0.5, 1, raw.shape[:2])).astype(np.float16)
        raw[:, :, start : start + 2] = steps[:, :, None].view(np.uint8)
    return raw.reshape(shape[0], -1)


def order_of(config: ModelConfig, name: str, shape: tuple[int, ...]) -> tuple[int, Tensor]:
    """Along which dimension llama.cpp's converter reorders a tensor, and what comes after what."""
    module, own = name.split(".")[-2], FAMILIES[config.architecture].gguf
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(module, 0)
    if own is not None and own.in_pairs and heads:
        return 0, torch.arange(shape[0]).view(heads, 2, -1).swapaxes(1, 2).flatten()
    delta, dim = config.stack.recurrence, int(module == "out_proj")
    plain = torch.arange(shape[dim])
    if not isinstance(delta, GatedDelta) or delta.by_key or "linear_attn" not in name or name.endswith("norm.weight"):
        return dim, plain
    first = 2 * delta.keys if module in ("in_proj_qkv", "conv1d") else 0
    tiled = plain[first:].view(delta.key_heads, delta.value_heads // delta.key_heads, -1).transpose(0, 1)
    return dim, torch.cat((plain[:first], tiled.flatten()))


def convert(directory: Path, file: Path, kind: TypeOf, tokens: Mapping[str, Any] | None = None) -> None:
    """Write the checkpoint as a GGUF file; afterwards the checkpoint holds, in fp32, what the file stands for."""
    config, checkpoint = ModelConfig.from_directory(directory), Checkpoint.open(directory)
    writer, floats = writer_of(file, config, tokens), {}
    values = json.loads((directory / "config.json").read_text())
    tensors = checkpoint.opened(checkpoint.files[0])
    names = [each for each in tensors.offset_keys() if each in checkpoint.tensors or each.startswith(PREDICTS)]
    if any(name.startswith(PREDICTS) for name in names):
        writer.add_block_count(config.num_layers + 1)
        writer.add_nextn_predict_layers(1)
    metadata = {"general.architecture": writer.arch, f"{writer.arch}.block_count": config.num_layers}
    all_of_them = {name: tensors.get_tensor(name).float() for name in names}
    if isinstance(config.attention, MLA):
        all_of_them = of_heads(all_of_them, config.attention.nope_dim, config.attention.v_head_dim)
    if writer.arch == "granitehybrid":
        all_of_them = _apart(directory, all_of_them, isinstance(config.first.mlp, Experts))
    if writer.arch == "qwen3next":
        all_of_them = _by_kind(directory, config, all_of_them)
    for seed, (name, tensor) in enumerate(_stacked(all_of_them).items()):
        there = theirs(name, GgufFile(file, metadata, {}))
        factor = _factor(values, name, tensor) if writer.arch == "falcon-h1" else 1.0
        floats[name] = _added(writer, config, (name, there), tensor * factor, kind, seed) / factor
    if writer.arch == "muse-glimmer":
        _add_norms_of_heads(writer, config)
    write(writer)
    save_file({name: tensor.contiguous() for name, tensor in floats.items()}, directory / SINGLE)


def _apart(directory: Path, tensors: dict[str, Tensor], mixture: bool) -> dict[str, Tensor]:
    """The same, with gates of MLPs apart from what they are for; the checkpoint will have them so too."""
    module, found = "mlp.shared." if mixture else "mlp.", dict[str, Tensor]()
    for name, tensor in tensors.items():
        if name.endswith("mlp.gate_up_proj.weight"):
            for kind, part in zip(("gate_proj", "up_proj"), tensor.chunk(2), strict=True):
                found[name.replace("mlp.gate_up_proj", module + kind)] = part
        else:
            found[name.replace("mlp.down_proj", f"{module}down_proj")] = tensor
    values = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**values, "shared_mlp_apart": True}))
    return found


def _by_kind(directory: Path, config: ModelConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same, with queries, keys and values of all keys apart from gates; the checkpoint will have them so too."""
    found, delta = dict[str, Tensor](), config.stack.recurrence
    assert isinstance(delta, GatedDelta)
    each = delta.values // delta.key_heads
    for name, tensor in tensors.items():
        if name.endswith("qkvz.weight"):
            parts = tensor.unflatten(0, (delta.key_heads, -1)).split((delta.key_dim, delta.key_dim, each, each), dim=1)
            *mixed, gates = (part.flatten(0, 1) for part in parts)
            found |= {name.replace("qkvz", "qkv"): torch.cat(mixed), name.replace("qkvz", "z"): gates}
        else:
            found[name] = tensor
    values = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**values, "linear_rates_apart": True}))
    return found


def _factor(values: Mapping[str, Any], name: str, tensor: Tensor) -> Tensor | float:
    """By what the converter multiplies a tensor of Falcon-H1."""
    read, (gate, down) = values["attention_in_multiplier"], values["mlp_multipliers"]
    wide, keys = values["mamba_d_ssm"], values["mamba_n_groups"] * values["mamba_d_state"]
    parts = torch.tensor(values["ssm_multipliers"]).repeat_interleave(
        torch.tensor([wide, wide, keys, keys, values["mamba_n_heads"]])
    )
    factors: dict[str, Tensor | float] = {
        "down_proj": down, "gate_proj": gate, "k_proj": values["key_multiplier"] * read, "q_proj": read, "v_proj": read,
        "o_proj": values["attention_out_multiplier"], "out_proj": values["ssm_out_multiplier"],
        "in_proj": values["ssm_in_multiplier"] * parts[:, None], "lm_head": values["lm_head_multiplier"],
        "embed_tokens": values["embedding_multiplier"],
    }  # fmt: skip
    return factors.get(name.split(".")[-2], 1.0)


def _stacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same, with one tensor for all experts, [E, O, K], gates apart from what they are for."""
    found, parts = dict[str, Tensor](), dict[str, list[Tensor]]()
    modules = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    for name, tensor in tensors.items():
        prefix = name.partition("block_sparse_moe.")[0] + "mlp.experts."
        if name.endswith("input_linear.weight"):
            for module, part in zip(("gate_proj", "up_proj"), tensor.chunk(2, dim=1), strict=True):
                found[f"{prefix}{module}.weight"] = part
        elif name.endswith("output_linear.weight"):
            found[f"{prefix}down_proj.weight"] = tensor
        elif one := re.fullmatch(r"(.*\.mlp\.experts\.)(gate_up|down)_proj(_bias)?", name):
            as_it_is = one[3] or name.startswith(PREDICTS)  # else gpt-oss's, transposed, in turns
            whole, kind = tensor if as_it_is else tensor.transpose(1, 2), "bias" if one[3] else "weight"
            halves = whole.chunk(2, dim=1) if name.startswith(PREDICTS) else (whole[:, ::2], whole[:, 1::2])
            both = dict(zip(("gate_proj", "up_proj"), halves, strict=True))
            turns = {"down_proj": whole} if one[2] == "down" else both
            found |= {f"{one[1]}{module}.{kind}": part.contiguous() for module, part in turns.items()}
        elif one := re.fullmatch(r"(.*\.layers\.\d+\.)\w+\.experts\.(\d+)\.(\w+)\.weight", name):
            parts.setdefault(f"{one[1]}mlp.experts.{modules.get(one[3], one[3])}.weight", []).append(tensor)
        else:
            found[name] = tensor
    return found | {name: torch.stack(each) for name, each in parts.items()}


def _added(writer: Any, config: ModelConfig, names: tuple[str, str], tensor: Tensor, kind: TypeOf, seed: int) -> Tensor:
    (name, there), (dim, order) = names, order_of(config, names[0], tuple(tensor.shape))
    turned, one = tensor.index_select(dim, order), name in config.less_one or name.startswith(PREDICTS)
    if tensor.dim() == 2 or ".experts." in name or "_b_proj" in name:
        of = "F32" if "ffn_gate_inp" in there or name.endswith(".bias") else kind(there)
        raw, found = blocks_of(turned, of, seed)
        raw = raw[0] if there.endswith("_inp_shexp.weight") else raw
        writer.add_tensor(there, raw, raw_dtype=gguf.GGMLQuantizationType[of])
        return found.index_select(dim, order.argsort())
    found = -turned.exp() if name.endswith(DECAYS) else turned.squeeze(1) if tensor.dim() == 3 else turned + one
    if isinstance(scan := config.stack.recurrence, Mamba2) and name.endswith((".A_log", ".D", ".mamba.norm.weight")):
        found = found.view(-1, scan.values // scan.key_heads if name.endswith("weight") else 1)
    writer.add_tensor(there, found.numpy())
    return tensor


def _add_norms_of_heads(writer: Any, config: ModelConfig) -> None:
    """As the converter makes them: of queries the factor, of keys ones."""
    factor = config.first.attention.scale * config.head_dim**0.5
    for number in range(config.num_layers):
        for kind, value in (("q", factor), ("k", 1.0)):
            numbers = np.full(config.head_dim, value, dtype=np.float32)
            writer.add_tensor(f"blk.{number}.attn_{kind}_norm.weight", numbers)


def _add_corrected(writer: Any, config: ModelConfig, mixture: Experts, shared: int) -> None:
    """What files of DeepSeek's routers say."""
    dense = [isinstance(layer.mlp, MLP) for layer in config.stack.layers]
    writer.add_leading_dense_block_count(sum(dense))
    writer.add_expert_shared_count(shared)
    writer.add_expert_weights_scale(mixture.router.scale)
    writer.add_expert_weights_norm(mixture.router.norm_topk)
    kind = gguf.ExpertGatingFuncType
    writer.add_expert_gating_func(kind.SIGMOID if mixture.router.sigmoid else kind.SOFTMAX)
    writer.add_expert_group_count(mixture.router.groups[0])
    writer.add_expert_group_used_count(mixture.router.groups[1])


def writer_of(file: Path, config: ModelConfig, tokens: Mapping[str, Any] | None = None) -> Any:
    """A file that has all but its tensors."""
    own, attention = FAMILIES[config.architecture].gguf, config.attention
    assert own is not None, "there are files of this family"
    writer = gguf.GGUFWriter(file, (own.mixture if config.stack.experts else "") or own.architecture)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(512)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_heads)
    attends = [isinstance(layer.mixer, Attention) for layer in config.stack.layers]
    counts = [config.num_kv_heads * each for each in attends]
    writer.add_head_count_kv(
        counts if own.architecture in ("lfm2", "lfm2moe", "granitehybrid", "nemotron_h") else config.num_kv_heads
    )
    writer.add_key_length(max(each.head_dim for each in config.stack.attentions))
    wide = max(each.head_dim for each in config.stack.attentions)
    writer.add_value_length(attention.kv_lora_rank if isinstance(attention, MLA) else wide)
    if isinstance(attention, MLA):
        writer.add_q_lora_rank(attention.q_lora_rank or 0)
        writer.add_kv_lora_rank(attention.kv_lora_rank)
        writer.add_key_length_mla(attention.nope_dim + attention.rotary_dim)
        writer.add_value_length_mla(attention.v_head_dim)
    (writer.add_layer_norm_eps if config.stack.norm.centred else writer.add_layer_norm_rms_eps)(config.rms_norm_eps)
    if any(config.ropes):
        writer.add_rope_freq_base(config.rope.theta)
        writer.add_rope_dimension_count(config.rope.rotated(attention.rotary_dim))
        _add_scaling(writer, config)
    if (mixture := config.stack.experts) is not None:
        inner = [layer.feed_forward.inner if layer.feed_forward else 0 for layer in config.stack.layers]
        writer.add_feed_forward_length(inner[0] or inner)
        writer.add_expert_feed_forward_length(mixture.inner)
        writer.add_expert_count(mixture.count)
        writer.add_expert_used_count(mixture.top_k)
        latent = isinstance(attention, MLA)
        if mixture.shared is not None and (own.mixture or (not latent and mixture.router.correction is None)):
            writer.add_expert_shared_feed_forward_length(mixture.shared.inner)
        if own.mixture:
            _add_corrected(writer, config, mixture, 1)
        elif mixture.shared is not None and (latent or mixture.router.correction is not None):
            _add_corrected(writer, config, mixture, mixture.shared.inner // mixture.inner)
        elif mixture.router.sigmoid:
            writer.add_leading_dense_block_count(sum(isinstance(layer.mlp, MLP) for layer in config.stack.layers))
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    else:
        inner = [config.intermediate_size * isinstance(layer.mixer, MLP) for layer in config.stack.layers]
        writer.add_feed_forward_length(inner if any(inner) else config.intermediate_size)
    window = next((each.window for each in config.stack.attentions if each.window), None)
    if window is not None and own.windowed:
        writer.add_sliding_window(window)
    if own.architecture == "gemma4":
        _add_gemma4(writer, config)
    numbers = {
        writer.add_attn_logit_softcapping: attention.softcap,
        writer.add_final_logit_softcapping: config.stack.logit_cap,
        writer.add_attention_scale: attention.scale if writer.arch.startswith("granite") else None,
        writer.add_residual_scale: config.first.residual_mul if writer.arch.startswith("granite") else None,
        writer.add_embedding_scale: config.stack.embedding_scale if writer.arch.startswith("granite") else None,
        writer.add_attn_temperature_scale: attention.query_scaling and attention.query_scaling.beta,
        writer.add_logit_scale: 1 / config.stack.logit_scale
        if writer.arch.startswith("granite")
        else None
        if writer.arch == "falcon-h1"
        else config.stack.logit_scale,
    }
    for add, number in numbers.items():
        if number not in (None, 1.0):
            add(number)
    match config.stack.recurrence:
        case GatedDelta() | Mamba2() as heads:
            _add_recurrence(writer, config, heads)
        case ShortConv(taps=taps):
            writer.add_shortconv_l_cache(taps)
    for key, value in (tokens or letters(config.vocab_size)).items():
        _add(writer, key, value)
    return writer


def _add_gemma4(writer: Any, config: ModelConfig) -> None:
    """What the converter says of Gemma 4: each layer's kind and widths, and which pairs of its whole heads turn."""
    attentions = config.stack.attentions
    narrow = next(each for each in attentions if each.window)
    widest = max(each.head_dim for each in attentions)
    writer.add_sliding_window_pattern([bool(each.window) for each in attentions])
    writer.add_shared_kv_layers(sum(each.source is not None for each in attentions))
    writer.add_embedding_length_per_layer_input(0 if (own := config.stack.embedding) is None else own.width)
    writer.add_key_length_swa(narrow.head_dim)
    writer.add_value_length_swa(narrow.head_dim)
    writer.add_rope_dimension_count_swa(narrow.head_dim)
    writer.kv_data[0].pop(f"{writer.arch}.attention.head_count_kv")
    writer.add_head_count_kv([each.kv_heads for each in attentions])
    writer.kv_data[0].pop(f"{writer.arch}.feed_forward_length")
    inner = [layer.mlp.inner for layer in config.stack.layers if isinstance(layer.mlp, MLP)]
    writer.add_feed_forward_length(inner if len(set(inner)) > 1 else inner[0])
    wide = next(each for each in attentions if not each.window)
    assert narrow.rope is not None and wide.rope is not None
    assert isinstance(wide.rope.parameters, ProportionalScaling)
    writer.add_rope_freq_base_swa(narrow.rope.theta)
    for key, value in (("freq_base", wide.rope.theta), ("dimension_count", widest)):
        writer.kv_data[0].pop(f"{writer.arch}.rope.{key}", None)
        {float: writer.add_rope_freq_base, int: writer.add_rope_dimension_count}[type(value)](value)
    turning = int(widest * wide.rope.parameters.share / 2)
    factors = np.array([1.0] * turning + [1e30] * (widest // 2 - turning), dtype=np.float32)
    writer.add_tensor("rope_freqs.weight", factors)


def _add_recurrence(writer: Any, config: ModelConfig, delta: Remembering) -> None:
    writer.add_ssm_conv_kernel(delta.taps)
    writer.add_ssm_state_size(delta.key_dim)
    writer.add_ssm_group_count(delta.key_heads)
    writer.add_ssm_time_step_rank(delta.value_heads)
    writer.add_ssm_inner_size(delta.values)
    if isinstance(delta, Mamba2):
        writer.add_rope_scaling_finetuned(any(config.ropes))
        return
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    kinds = [not isinstance(layer.mixer, Attention) for layer in config.stack.layers]
    _add(writer, f"{writer.arch}.attention.recurrent_layers", kinds)


def _add(writer: Any, key: str, value: Any) -> None:
    add = {
        int: writer.add_uint32,
        float: writer.add_float32,
        bool: writer.add_bool,
        str: writer.add_string,
        list: writer.add_array,
    }
    add[type(value)](key, value)


def _add_scaling(writer: Any, config: ModelConfig) -> None:
    match config.rope.parameters:
        case LinearScaling(factor=factor):
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(factor)
        case YarnScaling(factor=factor, original_positions=original, mscale_all_dim=share):
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(factor)
            writer.add_rope_scaling_orig_ctx_len(original)
            if share is not None:
                latent = isinstance(config.attention, MLA)
                writer.add_rope_scaling_yarn_log_mul(share * (0.1 if latent else 1))
        case LongScaling(short=short, long=long, original_positions=original, attention_factor=scale):
            writer.add_rope_scaling_orig_ctx_len(original)
            writer.add_rope_scaling_attn_factors(scale)
            for kind, factors in (("short", short), ("long", long)):
                writer.add_tensor(f"rope_factors_{kind}.weight", np.array(factors, dtype=np.float32))
        case Llama3Scaling():
            plain = config.rope.theta ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
            writer.add_tensor(
                "rope_freqs.weight",
                (plain / inverse_frequencies(config.rope, config.head_dim, config.max_positions)[0]).float().numpy(),
            )


def write(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def letters(count: int) -> dict[str, Any]:
    """A tokenizer of so many tokens that merges nothing."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [f"t{index}" for index in range(count)],
        "tokenizer.ggml.token_type": [3 if index < 3 else 1 for index in range(count)],
        "tokenizer.ggml.merges": ["t 1"],
        "tokenizer.ggml.eos_token_id": 2,
    }


def tokens_of(directory: Path, pre: str) -> dict[str, Any]:
    """The keys that llama.cpp's converter makes of a directory's BPE tokenizer."""
    values = json.loads((directory / "tokenizer.json").read_text("utf-8"))
    added = {each["id"]: each for each in values["added_tokens"]}
    names = {index: token for token, index in values["model"]["vocab"].items()}
    names |= {index: each["content"] for index, each in added.items()}
    size = max(names) + 1
    kinds = [5 if index not in names else 1 for index in range(size)]
    for index, each in added.items():
        kinds[index] = 3 if each["special"] else 4
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in values["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [names.get(index, f"[PAD{index}]") for index in range(size)],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": min(added),
    }
