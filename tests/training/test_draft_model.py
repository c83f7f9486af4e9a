"""A draft model that was trained is an ordinary small Llama, and a good one for its target, a GGUF file too."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from foresay.drafters.heads.draft_model import StudentModel
from foresay.drafters.heads.training_batch import TrainingBatch
from foresay.drafters.training.run import Run
from foresay.drafters.training.run_folder import RunFolder
from foresay.drafters.training.settings import Settings
from foresay.drafters.training.shapes import default_layers, default_width, draft_shape
from foresay.drafters.training.teacher import Teacher, _of_gguf
from foresay.kvpaging import PageTable
from foresay.server.catalog.hub import resolve
from foresay.server.engine.build import build_engine
from foresay.verifier.model.errors import ModelError
from tests.same_tokens.runs import assert_same, jobs_of
from tests.same_tokens.test_directories import config, witnessed
from tests.same_tokens.witness import run
from tests.verifier.families import FAMILIES, config_of, make
from tests.verifier.gguf_files import all_of, cache_of_its_own, convert
from tests.verifier.reading import Reader, load_decoder


@pytest.fixture(scope="module")
def teacher(target) -> Teacher:
    return Teacher(target, "cpu", torch.float32)


@pytest.fixture
def settings(target, prompts) -> Settings:
    return Settings("draft_model", str(target), str(prompts), 40, 24, 60, 4, 5e-3, 1, 0, layers=2, width=48)


@pytest.fixture
def trained(teacher, settings, tmp_path):
    """What the run printed, and its folder."""
    depths = Run(settings, teacher, RunFolder(tmp_path / "draft", settings), progress=False)().depths
    return depths, tmp_path / "draft"


def test_a_trained_draft_model_drafts(target, teacher, settings, trained, tmp_path) -> None:
    """Held-out loss falls with more steps, and the text stays what it was."""
    fewer = replace(settings, steps=1)
    (first,) = Run(fewer, teacher, RunFolder(tmp_path / "first", fewer), progress=False)().depths
    ((ours,), directory) = trained
    assert ours.loss < first.loss
    engine = witnessed(build_engine(config(target, str(directory), draft_tokens=4)))
    assert engine.drafter is not None
    assert engine.drafter.name == "draft_model"
    jobs = jobs_of(290, (9, 30, 20), 16)
    assert_same(run(witnessed(build_engine(config(target, "none"))), jobs), run(engine, jobs))


def test_transformers_reads_what_was_written_bit_for_bit(target, trained) -> None:
    _, directory = trained
    loaded: Any = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", output_loading_info=True)
    model, found = loaded
    assert not any(found.values())
    stored = load_file(directory / "model.safetensors")
    read = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    assert stored.keys() == read.keys()
    assert all(torch.equal(stored[name], read[name]) for name in stored)
    assert model.config.num_hidden_layers == 2
    assert model.config.hidden_size == 48
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (directory / name).read_bytes() == (target / name).read_bytes()
    text = "the quick brown fox"
    assert AutoTokenizer.from_pretrained(directory)(text) == AutoTokenizer.from_pretrained(target)(text)


@pytest.mark.parametrize(("kv_heads", "layers"), [(4, 1), (2, 3)])
def test_it_computes_what_transformers_computes(kv_heads, layers) -> None:
    source = LlamaConfig(
        vocab_size=120, hidden_size=64, intermediate_size=160, num_attention_heads=8, num_key_value_heads=2 * kv_heads
    )
    torch.manual_seed(1)
    ours = StudentModel(draft_shape(source, layers, 32)).eval()
    shape = ours.shape
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (4, kv_heads, 8)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    read: dict[str, Any] = {
        key: value for key, value in ours.config("t").items() if key not in ("architectures", "target_model")
    }
    theirs = AutoModelForCausalLM.from_config(LlamaConfig(**read)).eval()
    theirs.load_state_dict({**ours.published(), "lm_head.weight": ours._output.detach()})
    tokens = torch.randint(120, (2, 30), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        wanted, given = theirs(tokens).logits, ours(tokens) @ ours._output.T
    assert torch.allclose(given, wanted, rtol=1e-4, atol=1e-4)
    batch = TrainingBatch(tokens, {"final": wanted}, torch.eye(120))
    (loss,) = ours.losses(batch)
    entropy = -(wanted.softmax(-1) * wanted.log_softmax(-1)).sum(-1).mean()
    assert float(loss.detach()) == pytest.approx(float(entropy), rel=1e-4)
    (depth,) = ours.evaluate(batch, torch.Generator().manual_seed(0))
    assert depth.greedy == depth.sampled == 1.0


@pytest.mark.parametrize(
    ("width", "heads", "kv_heads", "layers", "head_dim", "wanted"),
    [
        (256, 4, 2, 8, 64, (2, 128, 2, 1)),
        (1024, 16, 8, 28, 128, (7, 512, 8, 4)),
        (576, 9, 3, 30, 64, (7, 288, 4, 2)),
        (64, 8, 1, 3, 8, (1, 32, 4, 1)),
    ],
)
def test_the_shape_it_has_by_default(width, heads, kv_heads, layers, head_dim, wanted) -> None:
    """A quarter of the layers, half of the width, and heads that divide among their keys."""
    source = LlamaConfig(
        hidden_size=width,
        intermediate_size=3 * width,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        num_hidden_layers=layers,
        head_dim=head_dim,
    )
    made = draft_shape(source, default_layers(source.num_hidden_layers), default_width(source.hidden_size))
    found = [made[f"num_{name}"] for name in ("hidden_layers", "attention_heads", "key_value_heads")]
    assert (found[0], made["hidden_size"], *found[1:]) == wanted
    assert made["head_dim"] == source.head_dim
    assert made["intermediate_size"] == 3 * wanted[1]


#: Between them they have everything that a layer may have.
KINDS = "qwen3 gemma3 gemma2 granite phi3 olmo2 cohere2 ministral3 hunyuan nemotron muse_glimmer"


@pytest.mark.parametrize("family", KINDS.split())
def test_a_draft_of_any_family_learns_and_is_served_as_it_learned(family, tmp_path) -> None:
    """Random, as what is published begins: only that loss falls, and that what was written computes the very same."""
    torch.manual_seed(0)
    own = config_of(family, vocab_size=40).get_text_config().to_dict()
    values = {**own, "architectures": [FAMILIES[family][1].__name__]}
    model, width = StudentModel(values), 24
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    tokens = torch.randint(40, (4, 40), generator=torch.Generator().manual_seed(2))
    batch = TrainingBatch(tokens, {"final": torch.randn(40, width)[tokens]}, torch.randn(40, width))
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=3e-3), []
    for _ in range(12):
        (loss,) = model.losses(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]
    (depth,) = model.evaluate(batch, torch.Generator().manual_seed(0))
    assert depth.loss < losses[-1]
    save_file(model.published(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(model.config("t")))
    reader = Reader(load_decoder(tmp_path))
    served = reader.model.run([reader.rows(PageTable(reader.pool), tokens[0].tolist())]).logits
    with torch.no_grad():
        trained = model.logits(model(tokens[:1])[0])
    assert torch.allclose(served, trained, rtol=0, atol=1e-4)


WIDTHS = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


@pytest.mark.parametrize(
    ("family", "shape"), [("smollm", {}), ("gemma3", {"query_pre_attn_scalar": 64, "num_hidden_layers": 6})]
)
def test_its_logits(tmp_path, monkeypatch, family, shape) -> None:
    """Gemma's norms are kept less one elsewhere, and whole there."""
    cache_of_its_own(tmp_path / "cache", monkeypatch)
    types = {"layer_types": ["sliding_attention"] * 5 + ["full_attention"]} if family == "gemma3" else {}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    make(family, tmp_path / "plain", **{**WIDTHS, **heads, **shape, **types})
    convert(tmp_path / "plain", tmp_path / "x.gguf", all_of("Q8_0"))
    oracle = FAMILIES[family][1].from_pretrained(tmp_path / "plain", dtype=torch.float32)
    found, tokens = _of_gguf(resolve(tmp_path / "x.gguf"), torch.float32).eval(), torch.arange(3, 40)[None]
    with torch.inference_mode():
        assert (found(tokens).logits - oracle(tokens).logits).abs().max() < 1e-3


def test_a_model_of_texts_and_images_is_refused(tmp_path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["MuseGlimmerForConditionalGeneration"]}')
    with pytest.raises(ModelError, match="texts and images"):
        _of_gguf(tmp_path, torch.float32)
