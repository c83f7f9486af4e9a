"""gpt-oss as it is published: experts in MXFP4, the rest in floats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from foresay.verifier.model.checkpoint import SINGLE
from tests.verifier.families import make

#: As the hub's config.json has it.
QUANTIZATION = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
    "quant_method": "mxfp4",
}  # fmt: skip
_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks uint8[.., K / 32, 16] and scales uint8[.., K / 32] of a weight [.., K], by the formats' words."""
    grouped = weight.unflatten(-1, (-1, 32))
    exponents = grouped.abs().amax(-1).clamp_min(2.0**-100).log2().floor() - 2
    scaled = grouped / exponents.exp2().unsqueeze(-1)
    codes = (scaled.abs().unsqueeze(-1) - _VALUES).abs().argmin(-1) + 8 * (scaled < 0)
    return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8), (exponents + 127).to(torch.uint8)


def publish(directory: Path, **shape: Any) -> None:
    """A checkpoint ``published``, and what it stands for in bf16, ``written``."""
    make("gpt_oss", directory / "made", **shape)
    config = json.loads((directory / "made" / "config.json").read_text())
    found = load_file(directory / "made" / SINGLE)
    published, written = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in found.items():
        published[name] = written[name] = tensor.bfloat16()
        if name.endswith(("gate_up_proj", "down_proj")):
            del published[name]
            blocks, scales = rounded(tensor.mT)
            published |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            written[name] = convert_moe_packed_tensors(blocks, scales)
    for kind, tensors, more in (
        ("published", published, {"quantization_config": QUANTIZATION}),
        ("written", written, {}),
    ):
        (directory / kind).mkdir()
        save_file(
            {name: each.contiguous() for name, each in tensors.items()}, directory / kind / SINGLE, {"format": "pt"}
        )
        (directory / kind / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16", **more}))
