"""How far a drafter's distribution is from the target's, depth by depth, on texts that the target wrote.

The cross-entropy bounds what a drafter can have accepted, so it stands beside the acceptance: a low acceptance at a low
cross-entropy is the engine's fault, at a high one the drafter's. Both models run here through their plain, trainable
forms in fp32, every row given that everything before it was right. Heads are judged if ``foresay train`` wrote them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from bench import record
from bench.drive import Options
from foresay.drafters.heads.dflash_model import DFlashModel, DFlashShape
from foresay.drafters.heads.eagle_model import EagleModel, EagleShape
from foresay.drafters.heads.lesson import Depth, Lesson
from foresay.drafters.heads.lesson import judge as compare
from foresay.drafters.heads.medusa_model import MedusaModel
from foresay.drafters.training.teacher import Teacher, Text
from foresay.server.engine.vocabulary import overlap
from foresay.spec.names import DRAFT_MODEL
from foresay.verifier.heads.config import HeadConfig
from foresay.verifier.heads.files import HeadTensors
from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.hub import resolve

Learner = MedusaModel | EagleModel | DFlashModel
#: What a drafter makes of one text.
Judge = Callable[[Lesson, torch.Generator], list[Depth]]


class CannotJudge(ValueError):
    """The head is not one that ``foresay train`` wrote, or the draft model has another vocabulary than the target."""


def draft_judge(directory: Path, target: Path) -> Judge:
    """A draft model sees the same text as the target, so it has one depth. CannotJudge if it has other tokens."""
    shared = overlap(target, directory)
    if shared is not None and not shared.whole:
        raise CannotJudge(f"{directory}: the draft model has another vocabulary than the target")
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, trust_remote_code=False)

    def judged(lesson: Lesson, generator: torch.Generator) -> list[Depth]:
        logits = model(lesson.tokens).logits
        return [compare(logits, lesson.logits[..., : logits.shape[-1]], generator)]

    return judged


def learner(kind: str, directory: Path, target: Path, teacher: Teacher, depths: int) -> Learner:
    """A trained head in the form in which it was trained; judged ``depths`` tokens ahead, a block as far as it guesses.

    Raises CannotJudge where its tensors are not those that training writes.
    """
    stored = HeadTensors.read(directory).tensors
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    model: Learner
    if kind == "medusa":
        model = MedusaModel(teacher.lm_head, len({name.partition(".")[0] for name in stored}))
    elif kind == "dflash":
        block = dflash_shape(directory, target, config)
        model = DFlashModel(block, teacher.embedding, drafted(stored, block.draft_vocab_size), teacher.lm_head)
    else:
        layers = HeadConfig.read(directory, ModelConfig.from_directory(target)).layers
        ids = drafted(stored, config["draft_vocab_size"])
        shape = EagleShape(**known(EagleShape, config), layers=layers)
        model = EagleModel(shape, teacher.embedding, ids, teacher.lm_head, passes=depths)
    own = model.published()
    if own.keys() != stored.keys():
        odd = sorted(own.keys() ^ stored.keys())[0]
        raise CannotJudge(f"{directory}: {odd} says that it is no head of foresay train")
    for name, tensor in own.items():
        tensor.copy_(stored[name])
    return model


def drafted(stored: Mapping[str, Tensor], count: int) -> Tensor:
    """int64[V']: the target's id of each draft id."""
    return torch.arange(count) + stored.get("d2t", torch.zeros(count, dtype=torch.int64))


def dflash_shape(directory: Path, target: Path, config: Mapping[str, Any]) -> DFlashShape:
    """The shape of a block head, from what its configuration says by any of its layouts."""
    read = HeadConfig.read(directory, ModelConfig.from_directory(target))
    layers, depth = tuple(int(name.removeprefix("layer.")) for name in read.names), int(config["num_target_layers"])
    own: dict[str, Any] = {"layers": layers, "target_layers": depth, "mask_token_id": read.mask}
    own["draft_vocab_size"] = read.draft_vocab
    return DFlashShape(**{**known(DFlashShape, config), **own})


def known(shape: type[EagleShape] | type[DFlashShape], config: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: config[field.name] for field in fields(shape) if field.name in config}


def entropy(logits: Tensor) -> float:
    """Mean over all rows of [..., V], in nats: the cross-entropy of a perfect drafter."""
    logs = logits.float().log_softmax(dim=-1)
    return float(-(logs.exp() * logs).sum(dim=-1).mean())


@torch.no_grad()
def report(options: Options, depths: Mapping[str, int], texts: Sequence[Sequence[int]], temperature: float) -> Any:
    """Print the table and return the record. depths: how far ahead each kind of drafter is judged."""
    teacher = Teacher(options.tokenizer, "cpu", torch.float32)
    judges: dict[str, Judge] = {}
    needs: set[str] = set()
    for kind, depth in depths.items():
        directory = resolve(str(options.directory(kind)))
        try:
            if kind == DRAFT_MODEL:
                judges[kind] = draft_judge(directory, options.tokenizer)
                continue
            model = learner(kind, directory, options.tokenizer, teacher, depth)
        except CannotJudge as error:
            print(f"not judged: {error}")
            continue
        judges[kind] = model.judged
        needs |= set(model.needs)
    lessons = [teacher.lesson([Text(torch.tensor(text), 1)], sorted(needs)) for text in texts]
    floor = sum(entropy(lesson.logits) for lesson in lessons) / len(lessons)
    found = {kind: means(judge, lessons) for kind, judge in judges.items()}
    show(found, floor, temperature)
    return {"entropy_of_target": floor, "written_at": temperature, "depths": found}


def means(judge: Judge, lessons: Sequence[Lesson]) -> dict[str, list[float]]:
    """By depth, the means over all texts of what :class:`foresay.drafters.heads.lesson.Depth` holds."""
    generator = torch.Generator().manual_seed(0)
    by_depth = list(zip(*(judge(lesson, generator) for lesson in lessons), strict=True))
    return {
        name: [sum(getattr(depth, name) for depth in column) / len(column) for column in by_depth]
        for name in ("loss", "greedy", "sampled")
    }


def show(found: Mapping[str, Mapping[str, Sequence[float]]], floor: float, temperature: float) -> None:
    """One row per drafter."""
    rows = [
        [kind, *(" ".join(f"{value:.2f}" for value in of[name]) for name in ("loss", "greedy", "sampled"))]
        for kind, of in found.items()
    ]
    title = f"on texts written at temperature {temperature:g}, by depth; the target's own entropy is {floor:.2f} nats"
    record.table(title, ["drafter", "cross-entropy, nats", "likeliest token is the target's", "same draw at T=1"], rows)
