"""A mixture of experts carved out of a dense model: ``python -m bench carve MODEL OUT --text FILE``.

The inner units of each MLP become the units of experts, by how they are activated in a text, as CMoE does
(arXiv:2502.04416)::

    shared experts    the units that are among the most active ones most often
    routed experts    the rest in groups of one size, each of units that are active together
    router            by ridge regression, from a token's hidden state to how active each group is

So its routing is that of real text, although nothing was trained: the output is that of the dense model without the
groups that are not chosen. OUT is a ``qwen2_moe`` checkpoint, whose figures are those of a carved model. A router's
chances are nearly equal, so that each chosen expert counts fully.

Legend: R tokens, H hidden width, I inner units, E routed experts.
"""

from __future__ import annotations

import json
import shutil
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from bench import BadOption
from bench.inflate import COPIED
from bench.perplexity import tokens_of
from foresay.drafters.training.progress import ProgressBar
from foresay.verifier.model.gguf.directory import directory_of
from foresay.verifier.model.gguf.file import GgufFile
from foresay.verifier.model.gguf.weights import GgufTensors
from foresay.verifier.ops.quantized import QuantizedMatrix

#: The share of the units that count as active for a token, rounds of grouping, and the size of a router's logits: far
#: below 1, so that their softmax is nearly even.
ACTIVE, ROUNDS, FAINT = 0.1, 8, 2.0**-10
#: The penalty of the regression, over the mean square of hidden states.
RIDGE = 0.1
MATRICES = ("gate_proj", "up_proj", "down_proj")


def options(parser: ArgumentParser) -> None:
    parser.add_argument("model", type=Path, help="a GGUF file, or a directory, of a Qwen2 model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="UTF-8; its first --tokens decide")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=16, help="routed ones")
    parser.add_argument("--chosen", type=int, default=8, help="of them, for each token")
    parser.add_argument("--shared", type=int, default=768, help="inner units of the shared expert")


@dataclass(frozen=True, slots=True)
class Carving:
    """How an MLP is cut. shared: int64, its units of the shared expert. experts: int64[E, I'], those of the routed
    ones. router: [E, H]."""

    shared: Tensor
    experts: Tensor
    router: Tensor


def main(args: Namespace) -> None:
    """Carve, and write the checkpoint."""
    model, directory = loaded(args.model)
    config = model.config
    if config.model_type != "qwen2":
        raise BadOption(f"{args.model} is a {config.model_type}: only a qwen2 can be carved into a qwen2_moe")
    routed = config.intermediate_size - args.shared
    if not 0 < args.shared < config.intermediate_size or routed % args.experts or args.chosen > args.experts:
        raise BadOption(
            f"--shared {args.shared} --experts {args.experts}: of {config.intermediate_size} units {routed} are left, "
            "which must be a multiple of the experts, of which at most all are chosen"
        )
    ids, before = tokens_of(directory, args.text.read_text("utf-8"))
    tensors = dict(model.state_dict())
    with ProgressBar("carved", config.num_hidden_layers, "layers") as progress:
        seen = activations(model, torch.tensor([[*before, *ids[: args.tokens]]]))
        for number, (hidden, inner) in enumerate(seen):
            cut = carved(hidden, inner, args.shared, args.experts)
            tensors |= parts(tensors, f"model.layers.{number}.mlp.", cut, args.chosen)
            progress.to(number)
    write(args, config.to_dict(), tensors, directory)


def loaded(path: Path) -> tuple[Any, Path]:
    """A model in fp32, and the directory of its tokenizer."""
    if path.suffix != ".gguf":
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, trust_remote_code=False), path
    directory, file = directory_of(path), GgufFile.read(path)
    values = json.loads((directory / "config.json").read_text("utf-8"))
    kept = {name: value for name, value in values.items() if value is not None and name != "quantization_config"}
    model = Qwen2ForCausalLM(Qwen2Config(**kept))
    found = {}
    for part in file.files:
        reader = GgufTensors.open(file, part)
        for name in reader.offset_keys():
            matrix = reader.get_tensor(name)
            found[name] = matrix.plain() if isinstance(matrix, QuantizedMatrix) else matrix.float()
    left = model.load_state_dict(found, strict=False)
    if left.unexpected_keys or set(left.missing_keys) - {"lm_head.weight"}:
        raise BadOption(f"{path}: is not a Qwen2 ({left})")
    model.tie_weights()
    return model.eval(), directory


def activations(model: Any, tokens: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each layer's MLP, in order: its inputs, [R, H], and inner activations, [R, I]."""
    inputs: list[Tensor] = []
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda _, given: inputs.append(given[0][0].detach()))
        for layer in model.model.layers
    ]
    with torch.inference_mode():
        model(tokens)
    for hook in hooks:
        hook.remove()
    for layer, x in zip(model.model.layers, inputs, strict=True):
        with torch.inference_mode():
            yield x.float(), (layer.mlp.act_fn(layer.mlp.gate_proj(x)) * layer.mlp.up_proj(x)).float().abs()


def carved(hidden: Tensor, inner: Tensor, shared: int, experts: int) -> Carving:
    """Cut an MLP. hidden: [R, H]. inner: [R, I], the size of its inner activations; shared: units of the shared
    expert."""
    count = max(1, int(ACTIVE * inner.shape[1]))
    active = torch.zeros_like(inner).scatter_(1, inner.topk(count, dim=1).indices, 1.0)
    order = active.sum(dim=0).argsort(descending=True, stable=True)
    left = order[shared:].sort().values
    groups = grouped(active[:, left].T, experts)
    routed = torch.stack([left[groups == expert] for expert in range(experts)])
    wanted = inner[:, routed.flatten()].view(len(inner), experts, -1).square().sum(dim=2).sqrt()
    return Carving(order[:shared].sort().values, routed, router(hidden, wanted))


def grouped(units: Tensor, groups: int) -> Tensor:
    """int64[N]: groups of one size, of rows that are alike; k-means in which a full group takes no more. units: [N,
    R]."""
    size, norms = len(units) // groups, units / units.norm(dim=1, keepdim=True).clamp(min=1.0)
    first = [0]
    for _ in range(groups - 1):  # each next one is the least like those before
        first.append(int((norms @ norms[first].T).max(dim=1).values.argmin()))
    centres = norms[first]
    found = torch.zeros(len(units), dtype=torch.int64)
    for _ in range(ROUNDS):
        alike = norms @ (centres / centres.norm(dim=1, keepdim=True).clamp(min=1e-6)).T
        best = alike.topk(min(2, groups), dim=1).values
        room = [size] * groups
        preferred = alike.argsort(dim=1, descending=True).tolist()
        for unit in (best[:, 0] - best[:, -1]).argsort(descending=True).tolist():
            group = next(each for each in preferred[unit] if room[each])
            found[unit], room[group] = group, room[group] - 1
        centres = torch.stack([norms[found == group].mean(dim=0) for group in range(groups)])
    return found


def router(hidden: Tensor, wanted: Tensor) -> Tensor:
    """[E, H]: the linear map from hidden states, [R, H], that comes closest to how active the groups are, [R, E], each
    compared with its own mean and spread."""
    wanted = (wanted - wanted.mean(dim=0)) / wanted.std(dim=0).clamp(min=1e-6)
    square = hidden.double().T @ hidden.double()
    penalty = RIDGE * square.diagonal().mean() * torch.eye(len(square), dtype=torch.float64)
    found: Tensor = torch.linalg.solve(square + penalty, hidden.double().T @ wanted.double())
    return FAINT * found.T.float()


def parts(tensors: dict[str, Tensor], prefix: str, cut: Carving, chosen: int) -> dict[str, Tensor]:
    """The tensors of a mixture; the dense MLP's are taken out. The chances of the chosen experts add up to 1, and the
    shared one's gate is a half."""
    gate, up, down = (tensors.pop(f"{prefix}{name}.weight") for name in MATRICES)
    made = {
        f"{prefix}gate.weight": cut.router,
        f"{prefix}shared_expert_gate.weight": torch.zeros(1, cut.router.shape[1]),
    }
    experts = {f"experts.{number}": (units, chosen) for number, units in enumerate(cut.experts)}
    for name, (units, factor) in (experts | {"shared_expert": (cut.shared, 2)}).items():
        own = gate[units], up[units], factor * down[:, units]
        made |= {f"{prefix}{name}.{matrix}.weight": part for matrix, part in zip(MATRICES, own, strict=True)}
    return made


def write(args: Namespace, config: dict[str, Any], tensors: dict[str, Tensor], directory: Path) -> None:
    """Write the checkpoint, with the tokenizer of the dense model."""
    units = config["intermediate_size"] - args.shared
    mixture = {
        "model_type": "qwen2_moe",
        "architectures": ["Qwen2MoeForCausalLM"],
        "num_experts": args.experts,
        "num_experts_per_tok": args.chosen,
        "norm_topk_prob": True,
        "moe_intermediate_size": units // args.experts,
        "shared_expert_intermediate_size": args.shared,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "dtype": "bfloat16",
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "config.json").write_text(json.dumps(config | mixture, indent=1, default=str), "utf-8")
    if config.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    kept = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    save_file(kept, args.out / "model.safetensors", metadata={"format": "pt"})
    for pattern in COPIED:
        for file in directory.glob(pattern):
            shutil.copyfile(file, args.out / file.name)
    active = args.shared + args.chosen * (units // args.experts)
    print(f"{args.out}: {active} of {config['intermediate_size']} inner units are computed for each token")
