"""Cuts each MLP of a Llama checkpoint into experts: ``python -m bench cut SOURCE OUT [--experts 64] [--chosen 8]``.

The result is a Mixtral. Units with similar gates go to one expert: they are halved along the direction in which their
gates differ most, recursively. An expert's router is the mean of its gates, so a row goes where gates open: similar
rows share experts, as in a trained mixture. The output differs from the source's.
"""

from __future__ import annotations

import json
import shutil
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from bench.inflate import COPIED, read_tensors

#: How far the logits of a router are apart: a trained one is neither flat nor certain.
SPREAD = 2.0
MLP = "mlp."


def options(parser: ArgumentParser) -> None:
    parser.add_argument("source", type=Path, help="directory of a Llama checkpoint, perhaps an inflated one")
    parser.add_argument("out", type=Path)
    parser.add_argument("--experts", type=int, default=64, help="a power of two (64)")
    parser.add_argument("--chosen", type=int, default=8)


def main(args: Namespace) -> None:
    config = json.loads((args.source / "config.json").read_text())
    source, width = read_tensors(args.source), read_of(config)
    tensors = {name: one for name, one in source.items() if MLP not in name}
    for layer in range(config["num_hidden_layers"]):
        tensors |= cut(f"model.layers.{layer}.", source, width, args.experts, args.chosen)
    args.out.mkdir(parents=True)
    save_file(tensors, args.out / "model.safetensors", metadata={"format": "pt"})
    config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": args.experts}
    config |= {"num_experts_per_tok": args.chosen, "intermediate_size": config["intermediate_size"] // args.experts}
    (args.out / "config.json").write_text(json.dumps({**config, "sliding_window": None}, indent=2))
    for path in (path for pattern in COPIED for path in args.source.glob(pattern)):
        shutil.copy(path, args.out / path.name)


def read_of(config: Mapping[str, Any]) -> int:
    """How many numbers of a row carry the function: for an inflated model as many as its source has."""
    inflated = config.get("foresay_inflated", {}).get("source_shape", {})
    return int(inflated.get("hidden", config["hidden_size"]))


def cut(prefix: str, source: Mapping[str, Tensor], width: int, experts: int, chosen: int) -> dict[str, Tensor]:
    """A layer's router and experts. width: the numbers of a row that carry the function."""
    gate, up, down = (source[f"{prefix}{MLP}{name}_proj.weight"] for name in ("gate", "up", "down"))
    groups = list(halved(gate[:, :width].float(), torch.arange(len(gate)), experts))
    inside = f"{prefix}block_sparse_moe."
    routers = torch.stack([gate[group].float().mean(0) for group in groups])
    routers -= routers.mean(0)
    routers *= SPREAD / routers.norm(dim=1).mean()
    made = {f"{inside}gate.weight": routers.to(gate.dtype)}
    for number, group in enumerate(groups):
        parts = {"w1": gate[group], "w3": up[group], "w2": down[:, group] * chosen}  # weights of a row add up to one
        made |= {f"{inside}experts.{number}.{name}.weight": part.contiguous() for name, part in parts.items()}
    return made


def halved(gates: Tensor, units: Tensor, pieces: int) -> Iterator[Tensor]:
    """Units in so many groups of one size."""
    if pieces == 1:
        yield units
        return
    own = gates[units] - gates[units].mean(0)
    direction = power(own)
    order = units[(own @ direction).argsort()]
    for half in order.tensor_split(2):
        yield from halved(gates, half, pieces // 2)


def power(rows: Tensor) -> Tensor:
    """Approximately the direction in which rows differ most."""
    found = torch.ones(rows.shape[1])
    for _ in range(20):
        found = torch.nn.functional.normalize(rows.T @ (rows @ found), dim=0)
    return found
