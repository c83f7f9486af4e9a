"""Layers that predict further tokens as DeepSeek, GLM, MiMo and ERNIE publish them, compared with transformers' own."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_layers import MtpLayer

from foresay.kvpaging import KVStore
from foresay.server.engine.build import build_engine
from foresay.server.engine.drafters.registry import find
from foresay.server.settings.resolved import CannotRun, choose_draft
from foresay.spec.protocols import Rows
from foresay.verifier.heads.paged import EagleHead
from foresay.verifier.heads.reader import read_mtp
from foresay.verifier.model.config import ModelConfig, kv_shapes
from tests.same_tokens.runs import assert_same, jobs_of, plain
from tests.same_tokens.test_directories import config, witnessed
from tests.same_tokens.witness import run
from tests.verifier.families import make
from tests.verifier.reading import Reader, load_decoder, random_tokens


class Published(NamedTuple):
    """family: of the target, of three layers; architecture: what its config.json says, if something else. names: of
    transformers' modules in files; what is not there is the target's. raw: states are those before a last norm. copies:
    of what the target has, by name."""

    family: str
    names: dict[str, str]
    raw: bool = False
    architecture: str | None = None
    copies: Mapping[str, str] = MappingProxyType({})


_BEHIND, _MIMO, _ERNIE = "model.layers.3.", "model.mtp_layers.0.", "model.mtp_"
_DEEPSEEK = Published(
    "qwen3",
    {"enorm": f"{_BEHIND}enorm", "hnorm": f"{_BEHIND}hnorm", "eh_proj": f"{_BEHIND}eh_proj",
     "post_norm": f"{_BEHIND}shared_head.norm", "mtp_block": _BEHIND[:-1]},
    copies={f"{_BEHIND}shared_head.head.weight": "lm_head.weight",
            f"{_BEHIND}embed_tokens.weight": "model.embed_tokens.weight"},
)  # fmt: skip
LAYOUTS = {
    "deepseek": _DEEPSEEK,
    "glm": _DEEPSEEK._replace(family="glm4_moe"),  # whose first layer has no experts, and this one some
    "latent": _DEEPSEEK._replace(family="glm4_moe_lite"),
    "mimo": Published(
        "qwen2",
        {"enorm": f"{_MIMO}token_layernorm", "hnorm": f"{_MIMO}hidden_layernorm", "eh_proj": f"{_MIMO}input_proj",
         "post_norm": f"{_MIMO}final_layernorm", "mtp_block": _MIMO[:-1]},
        raw=True, architecture="MiMoForCausalLM",
    ),
    "ernie": Published(
        "llama2",
        {"enorm": f"{_ERNIE}emb_norm.0", "hnorm": f"{_ERNIE}hidden_norm.0", "eh_proj": f"{_ERNIE}linear_proj.0",
         "mtp_block": f"{_ERNIE}block.0"},
    ),
}  # fmt: skip


def of_each(name: str, stack: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Of a tensor of all experts those of each, which is how they are published."""
    before, inside, module = name.partition("experts.")
    if not inside or stack.dim() < 3:
        yield name, stack
        return
    modules = ("gate_proj", "up_proj") if module.startswith("gate_up") else ("down_proj",)
    for number, one in enumerate(stack):
        for kind, part in zip(modules, one.chunk(len(modules)), strict=True):
            yield f"{before}experts.{number}.{kind}.weight", part


@torch.no_grad()
def publish(directory: Path, how: Published) -> tuple[Any, Any]:
    """A target with such a layer, in ``directory``; both as transformers has them."""
    model = make(how.family, directory)
    model.config.mtp_hidden_states_first = how.raw
    kinds = type(model.model.layers[0]), type(model.model.norm)
    layer: Any = MtpLayer(model.config, *kinds, len(model.model.layers) - 1, use_post_norm=True)
    generator = torch.Generator().manual_seed(5)
    for parameter in layer.parameters():
        size, mean = (0.3, 1) if parameter.dim() == 1 else (1.5 / parameter.shape[1] ** 0.5, 0)
        parameter.copy_(mean + size * torch.randn(parameter.shape, generator=generator))
    if "post_norm" not in how.names:
        layer.post_norm = model.model.norm
    file, state = directory / "model.safetensors", model.state_dict()
    own = {f"{how.names[name.partition('.')[0]]}.{name.partition('.')[2]}": part.clone()
           for whole, stack in layer.state_dict().items() for name, part in of_each(whole, stack)
           if name.partition(".")[0] in how.names}  # fmt: skip
    copies = {name: state[of].clone() for name, of in how.copies.items() if of in state}
    save_file({**load_file(file), **own, **copies}, file, metadata={"format": "pt"})
    if how.architecture is not None:
        values = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(values | {"architectures": [how.architecture]}))
    return model, layer.eval()


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any, Any]]:
    made: dict[str, tuple[Path, Any, Any]] = {}

    def get(name: str) -> tuple[Path, Any, Any]:
        if name not in made:
            directory = tmp_path_factory.mktemp(name)
            made[name] = directory, *publish(directory, LAYOUTS[name])
        return made[name]

    return get


@torch.inference_mode()
def predicted(model: Any, layer: Any, tokens: list[int], hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """States before and behind the last norm, [R, H], of tokens from position 1 on, and the likeliest ones after them.
    hidden: [R, H], of those before."""
    embedded, layer.use_post_norm = model.get_input_embeddings()(torch.tensor(tokens[1:]))[None], False
    rotation = model.model.rotary_emb(embedded, torch.arange(1, len(tokens))[None])
    mask = torch.full((len(tokens) - 1,) * 2, float("-inf")).triu(1)[None, None]
    raw = layer(embedded, hidden[None], rotation, mask, None, None)
    normed = layer.post_norm(raw)[0]
    return raw[0], normed, model.get_output_embeddings()(normed).argmax(-1)


@pytest.mark.parametrize("name", LAYOUTS)
def test_states_are_those_of_transformers_and_are_fed_back(published, name) -> None:
    directory, model, layer = published(name)
    target, tokens, raw = load_decoder(directory), random_tokens(random.Random(1), 40, 300), LAYOUTS[name].raw
    reader, head = Reader(target), EagleHead(*read_mtp(directory, target), 512)
    assert head.config.needs.final != raw
    table = reader.open()
    passed = reader.model.run([reader.rows(table, tokens)], head.config.needs)
    with torch.inference_mode():
        states = model(torch.tensor([tokens]), output_hidden_states=True)
    hidden = head.fuse(passed.features).clone()
    if not raw:  # transformers' last one is normed
        assert (hidden - states.hidden_states[-1][0]).abs().max() < 1e-4
    else:
        assert target.final_norm is not None
        assert (target.final_norm.weight * hidden * (hidden.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
                - states.hidden_states[-1][0]).abs().max() < 1e-4  # fmt: skip
    seen = hidden[:-1]
    for _ in range(2):
        store = KVStore(reader.pool, kv_shapes(head.layer), torch.float32)
        store.clear(table.slots(0, 1))
        logits, ours = head.run([Rows(table, torch.tensor(tokens[1:]), 1)], seen, store)
        theirs = predicted(model, layer, tokens, seen)
        assert (ours - theirs[not raw]).abs().max() < 2e-4
        assert torch.equal(logits.argmax(-1), theirs[2])
        seen = ours


@pytest.mark.parametrize("name", LAYOUTS)
def test_they_draft(published, name) -> None:
    """By ``auto`` too, and change nothing."""
    directory, *_ = published(name)
    settings = config(directory, "auto")
    assert choose_draft(settings).value == "mtp,suffix"
    jobs = jobs_of(300, (9, 60, 17, 1, 33, 3), 24)
    texts = plain(load_decoder(directory), jobs)
    for draft, tree in (("mtp", "3,2,1"), ("auto", None)):
        engine = witnessed(build_engine(config(directory, draft, draft_tree=tree)))
        assert_same(texts, run(engine, jobs))
        assert_same(texts, run(engine, jobs))


def test_with_layers_that_no_head_has_they_are_refused(tmp_path) -> None:
    """Gemma's have norms on both sides."""
    publish(tmp_path, LAYOUTS["deepseek"]._replace(family="gemma2"))
    assert choose_draft(config(tmp_path, "auto")).value == "suffix"
    with pytest.raises(CannotRun, match="not known beside such layers"):
        find("mtp").checked(tmp_path, ModelConfig.from_directory(tmp_path))
