"""What writers of hand-made checkpoints share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from foresay.verifier.model.decoder import Decoder
from tests.heads.plain import Weights


def noise(generator: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=generator).mul_(scale / shape[-1] ** 0.5)


def write_config(directory: Path, config: Mapping[str, Any]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def contiguous(weights: Weights) -> Weights:
    return {name: tensor.clone().contiguous() for name, tensor in weights.items()}


def output_matrix(target: Decoder) -> Tensor:
    """The target's output head as a matrix: what it makes of the unit vectors."""
    rows: Tensor = target.head(torch.eye(target.config.hidden_size, dtype=target.dtype)).float()
    return rows.T.contiguous()


def write_weights(directory: Path, weights: Weights, file: str) -> None:
    """In one file of that name, or in ``sharded`` ones."""
    if file == "sharded":
        write_shards(directory, weights)
    elif file.endswith(".safetensors"):
        save_file(contiguous(weights), directory / file)
    else:
        torch.save(weights, directory / file)


def write_shards(directory: Path, weights: Weights) -> None:
    """Two files and their index."""
    names = sorted(weights)
    files = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, inside in files.items():
        save_file(contiguous({name: weights[name] for name in inside}), directory / file)
    index = {"weight_map": {name: file for file, inside in files.items() for name in inside}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
