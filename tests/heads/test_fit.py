"""A head that was trained for its target raises no doubts at load; one that was broken since, or a tuned target, does.

The target has learned the trial text by heart and the heads have learned from it for some steps: random ones would fit
nobody.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from foresay.drafters.heads.eagle_model import EagleModel, EagleShape
from foresay.drafters.heads.lesson import Lesson
from foresay.drafters.heads.medusa_model import MedusaModel
from foresay.server.engine.build import build_engine
from foresay.server.engine.drafters.head import TRIAL, clearly_better
from tests.heads.writing import change_config
from tests.same_tokens.models import blur
from tests.same_tokens.test_directories import config, write_tokenizer
from tests.verifier.families import make

pytestmark = pytest.mark.slow

LAYERS = (2, 3, 5)


@dataclass
class Trained:
    """A target and heads for it. text: the trial text, three times; model: the target as transformers has it."""

    root: Path
    text: Tensor
    model: Any

    def batch(self) -> Tensor:
        starts = torch.randint(len(self.text) // 3, (8,)).tolist()
        return torch.stack([self.text[start : start + 64] for start in starts])

    def lesson(self) -> Lesson:
        tokens = self.batch()
        with torch.no_grad():
            out = self.model(tokens, output_hidden_states=True)
        features = {f"layer.{layer}": out.hidden_states[layer] for layer in LAYERS}
        return Lesson(tokens, {**features, "final": out.hidden_states[-1]}, self.model.lm_head.weight)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    root = tmp_path_factory.mktemp("trained")
    model = make("llama2", root / "target", num_hidden_layers=6, vocab_size=290)
    write_tokenizer(root / "target", 290)
    text = torch.tensor(Tokenizer.from_file(str(root / "target" / "tokenizer.json")).encode(TRIAL).ids)
    made = Trained(root, text.repeat(3), model)
    with torch.enable_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        teach_target(made)
        medusa = MedusaModel(model.lm_head.weight.detach(), 1)
        lessons = [made.lesson() for _ in range(90)]
        teach(made, lessons, medusa, "medusa")
        shape = EagleShape(
            vocab_size=290, draft_vocab_size=290, hidden_size=64, intermediate_size=160,
            num_attention_heads=4, num_key_value_heads=4, head_dim=16, rms_norm_eps=1e-5, rope_theta=10_000.0,
            max_position_embeddings=512, layers=LAYERS,
        )  # fmt: skip
        embed = model.model.embed_tokens.weight.detach()
        teach(made, lessons, EagleModel(shape, embed, torch.arange(290), model.lm_head.weight.detach(), 2), "eagle3")
    return made


def teach_target(made: Trained) -> None:
    for weight in made.model.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.05)

    def losses() -> Iterator[Tensor]:
        tokens = made.batch()
        yield made.model(tokens, labels=tokens).loss

    descend(made.model, losses, 110)
    made.model.save_pretrained(made.root / "target")


def teach(made: Trained, lessons: list[Lesson], model: MedusaModel | EagleModel, name: str) -> None:
    given = iter(lessons)
    descend(model, lambda: model.losses(next(given)), len(lessons), 3e-3 if name == "medusa" else 6e-3)
    (made.root / name).mkdir()
    file = "medusa_lm_head.safetensors" if name == "medusa" else "model.safetensors"
    save_file({key: tensor.clone().contiguous() for key, tensor in model.published().items()}, made.root / name / file)
    (made.root / name / "config.json").write_text(json.dumps(model.config("target")))


def descend(model: torch.nn.Module, losses: Callable[[], Iterator[Tensor]], steps: int, rate: float = 3e-3) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for _ in range(steps):
        for loss in losses():
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def reason(target: Path, head: Path, **changes: object) -> str:
    before = torch.is_grad_enabled()
    try:
        return build_engine(config(target, str(head), **changes)).info.drafter_reason
    finally:
        torch.set_grad_enabled(before)


def copied(trained: Trained, name: str, to: Path) -> Path:
    shutil.copytree(trained.root / name, to / name)
    return to / name


@pytest.mark.parametrize("name", ["medusa", "eagle3"])
def test_a_trained_head_raises_no_doubts(trained, name) -> None:
    assert reason(trained.root / "target", trained.root / name) == "asked for"


def test_wrong_layers_are_noticed(trained, tmp_path) -> None:
    """The right ones are not among what is tried, but better ones are."""
    head = copied(trained, "eagle3", tmp_path)
    change_config(head, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 2]})
    message = reason(trained.root / "target", head)
    ours, better = (int(share) for share in re.findall(r"(\d+)% ", message))
    assert 20 <= ours < better
    assert re.search(r"with layers \d, \d and \d$", message)
    change_config(head, eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 3, 5]})
    assert reason(trained.root / "target", head) == "asked for"


def signs() -> Tensor:
    return torch.randint(2, (64,), generator=torch.Generator().manual_seed(1)) * 2.0 - 1


def test_a_wrong_norm_in_the_head_is_noticed(trained, tmp_path) -> None:
    """Another head's: as large, but not at the positions where this one needs it."""
    head = copied(trained, "eagle3", tmp_path)
    stored = load_file(head / "model.safetensors")
    save_file({**stored, "norm.weight": stored["norm.weight"] * signs()}, head / "model.safetensors")
    assert "it may be made for another model, read other layers, or have learned too little" in reason(
        trained.root / "target", head
    )


def test_a_wrong_norm_in_the_target_is_noticed(trained, tmp_path) -> None:
    """The same logits behind another norm: heads that read the state there do not know it."""
    target = copied(trained, "target", tmp_path)
    stored = load_file(target / "model.safetensors")
    turned = {name: stored[name] * signs() for name in ("model.norm.weight", "lm_head.weight")}
    save_file({**stored, **turned}, target / "model.safetensors", {"format": "pt"})
    assert "it may be made for another model" in reason(target, trained.root / "medusa")
    assert reason(target, trained.root / "eagle3") == "asked for"


@pytest.mark.parametrize("name", ["medusa", "eagle3"])
def test_a_target_tuned_far_away_is_noticed(trained, tmp_path, name) -> None:
    """A little tuning leaves a head useful, so nothing is reported."""
    from transformers import AutoModelForCausalLM

    for distance, doubted in ((0.1, False), (1.0, True)):
        target = tmp_path / str(distance)
        shutil.copytree(trained.root / "target", target)
        tuned = AutoModelForCausalLM.from_pretrained(target)
        blur(tuned, distance)
        tuned.save_pretrained(target)
        assert ("it may be made for another model" in reason(target, trained.root / name)) == doubted


def test_better_is_more_than_chance() -> None:
    ours = torch.tensor([True] * 50 + [False] * 50)
    assert not clearly_better(ours, ours)
    assert not clearly_better(ours, ours.roll(3))  # three won, three lost
    assert not clearly_better(ours, torch.tensor([True] * 54 + [False] * 46))  # four won: twice the deviation, not more
    assert clearly_better(ours, torch.tensor([True] * 55 + [False] * 45))
    assert not clearly_better(torch.tensor([True] * 55 + [False] * 45), ours)
