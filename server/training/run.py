"""One training run, from prompts to a head's directory; killed at any time, the same command goes on.

::

    OUT.work/settings.json     what the run was started with; other settings are refused
    OUT.work/text-0000.pt ...  what the target wrote, batch by batch
    OUT.work/state.pt          weights, optimiser and step, every so often
    OUT/                       the finished head; the work folder is removed then

Every random choice is a function of the seed and of the step or batch number, so a run that was interrupted ends with
the same weights as one that was not.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from drafters.heads.eagle_model import EagleModel, EagleShape
from drafters.heads.lesson import Depth
from drafters.heads.medusa_model import MedusaModel
from server.training import files
from server.training.teacher import Teacher
from spec.errors import ConfigurationError

Model = MedusaModel | EagleModel

#: Texts written side by side, and seconds between two saved states.
_WRITTEN_AT_ONCE = 128
_SAVED_EVERY = 60.0
#: One text in so many is held out to judge the head.
_HELD_OUT = 20
#: A draft vocabulary larger than this is cut to the tokens the target wrote most often.
_LARGEST_VOCABULARY = 32_000


@dataclass(frozen=True, slots=True)
class Settings:
    """What decides the result of a run. Counts are of texts, of tokens in one, of steps and of texts in a step.

    temperatures: what the target writes at, batch by batch in turn.
    """

    kind: str
    target: str
    prompts: str
    samples: int
    length: int
    steps: int
    batch: int
    rate: float
    depth: int
    seed: int
    temperatures: tuple[float, ...] = (1.0, 0.0)


class Run:
    """The phases of a run, each resumable."""

    def __init__(self, settings: Settings, teacher: Teacher, out: Path, progress: bool = True) -> None:
        self.settings, self.teacher, self.out = settings, teacher, out
        self.work = out.with_name(out.name + ".work")
        self._progress = progress
        if (out / "config.json").exists():
            raise ConfigurationError(f"--out {out}: holds a model already; name another folder")
        self._claim()

    def _claim(self) -> None:
        """Take the work folder, or find it taken by this very run."""
        path, ours = self.work / "settings.json", json.loads(json.dumps(asdict(self.settings)))
        if path.exists():
            theirs = json.loads(path.read_text(encoding="utf-8"))
            other = next((key for key in ours if theirs.get(key) != ours[key]), None)
            if other is not None:
                raise ConfigurationError(
                    f"{self.work}: belongs to a run with {other} {theirs.get(other)} instead of {ours[other]}; "
                    "give the same settings to go on with it, or remove it"
                )
        files.write(path, lambda partial: partial.write_text(json.dumps(ours), encoding="utf-8"))

    def __call__(self) -> list[Depth]:
        """Write, learn, judge and publish; returns how the head does at each depth on held-out text."""
        texts, length = self.texts(), self.settings.length
        held = packed(texts[::_HELD_OUT], length)
        learned = packed([text for number, text in enumerate(texts) if number % _HELD_OUT], length)
        model = self.model(learned).to(self.teacher.device)
        self.learn(model, learned)
        depths = self.judge(model, held)
        name = "medusa_lm_head.safetensors" if isinstance(model, MedusaModel) else "model.safetensors"
        config = model.config(self.settings.target)
        files.publish(self.out, name, model.published(), config, self.teacher.stored_dtype)
        files.remove(self.work)
        return depths

    def texts(self) -> list[Tensor]:
        """What the target wrote: int64[T] each."""
        prompts = self._prompts()
        starts = range(0, len(prompts), _WRITTEN_AT_ONCE)
        bar = self._bar("the target writes", len(starts))
        texts = []
        for number, start in enumerate(starts):
            texts += self._batch(prompts[start : start + _WRITTEN_AT_ONCE], number)
            bar.update()
        bar.close()
        return texts

    def _prompts(self) -> list[list[int]]:
        """One prompt per sample, in a random choice, then by length: those side by side are cut to the shortest."""
        prompts = self.teacher.prompts(Path(self.settings.prompts), self.settings.length)
        generator = torch.Generator().manual_seed(self.settings.seed)
        order = torch.randperm(len(prompts), generator=generator).tolist()
        return sorted((prompts[order[i % len(order)]] for i in range(self.settings.samples)), key=len)

    def _batch(self, prompts: list[list[int]], number: int) -> list[Tensor]:
        path, settings = self.work / f"text-{number:04d}.pt", self.settings
        if not path.exists():
            generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + number)
            temperature = settings.temperatures[number % len(settings.temperatures)]
            files.save(path, self.teacher.write(prompts, settings.length, temperature, generator))
        texts: list[Tensor] = torch.load(path, weights_only=True)
        return texts

    def model(self, texts: Tensor) -> Model:
        """A fresh head for the target."""
        torch.manual_seed(self.settings.seed)
        teacher = self.teacher
        if self.settings.kind == "medusa":
            return MedusaModel(teacher.lm_head, self.settings.depth)
        ids = draft_vocabulary(texts, teacher.config.vocab_size)
        shape = eagle_shape(teacher.config, len(ids))
        return EagleModel(shape, teacher.embedding, ids.to(teacher.device), teacher.lm_head, self.settings.depth)

    def learn(self, model: Model, texts: Tensor) -> None:
        """All steps that are left."""
        settings, path = self.settings, self.work / "state.pt"
        optimizer = torch.optim.AdamW(model.parameters(), lr=settings.rate, betas=(0.9, 0.95), weight_decay=0.01)
        first = self._resumed(model, optimizer, path)
        bar = self._bar(f"the {settings.kind} head learns", settings.steps, first)
        saved = time.monotonic()
        for step in range(first, settings.steps):
            for group in optimizer.param_groups:
                group["lr"] = settings.rate * rate_at(step, settings.steps)
            bar.set_postfix(loss=f"{self._step(model, optimizer, texts, step):.3f}", refresh=False)
            bar.update()
            if time.monotonic() - saved > _SAVED_EVERY:
                self._save(model, optimizer, path, step + 1)
                saved = time.monotonic()
        bar.close()
        self._save(model, optimizer, path, settings.steps)

    @torch.enable_grad()
    def _step(self, model: Model, optimizer: torch.optim.Optimizer, texts: Tensor, step: int) -> float:
        generator = torch.Generator().manual_seed(self.settings.seed * 1_000_033 + step)
        chosen = texts[torch.randint(len(texts), (self.settings.batch,), generator=generator)]
        total = 0.0
        with self._half():
            losses: Iterator[Tensor] = model.losses(self.teacher.lesson(chosen, model.needs))
            for loss in losses:
                loss.backward()
                total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    def _half(self) -> torch.autocast:
        """Products in bf16, where they are faster so; weights and sums stay fp32."""
        device = self.teacher.device
        able = torch.cpu.get_capabilities()
        native = device != "cpu" or able.get("avx512_bf16") or able.get("amx_bf16") or able.get("bf16")
        return torch.autocast(device, torch.bfloat16, enabled=bool(native))

    def _resumed(self, model: Model, optimizer: torch.optim.Optimizer, path: Path) -> int:
        """The first step to do; weights and optimiser are brought up to it."""
        if not path.exists():
            return 0
        state = torch.load(path, map_location=self.teacher.device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])

    def _save(self, model: Model, optimizer: torch.optim.Optimizer, path: Path, step: int) -> None:
        files.save(path, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step})

    def judge(self, model: Model, texts: Tensor) -> list[Depth]:
        """Means over held-out texts, depth by depth."""
        generator = torch.Generator().manual_seed(0)
        parts = texts[: 4 * self.settings.batch].split(self.settings.batch)
        found = [model.judged(self.teacher.lesson(part, model.needs), generator) for part in parts]
        return [_mean([depths[number] for depths in found]) for number in range(len(found[0]))]

    def _bar(self, text: str, total: int, first: int = 0) -> tqdm[Any]:
        return tqdm(total=total, initial=first, desc=text, file=sys.stderr, disable=not self._progress)


def _mean(depths: list[Depth]) -> Depth:
    count = len(depths)
    return Depth(*(sum(getattr(depth, name) for depth in depths) / count for name in ("loss", "greedy", "sampled")))


def rate_at(step: int, steps: int) -> float:
    """The learning rate's factor: a short warm-up, then half a cosine down to a twentieth."""
    warm = max(1, min(100, steps // 10))
    if step < warm:
        return (step + 1) / warm
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def packed(texts: Sequence[Tensor], length: int) -> Tensor:
    """int64[N, length]: texts one behind the other, cut into rows; at least one row, the last one whole."""
    stream = torch.cat(list(texts))
    stream = stream.repeat(-(-length // len(stream)))
    return stream[: len(stream) // length * length].view(-1, length)


def draft_vocabulary(texts: Tensor, vocab_size: int) -> Tensor:
    """int64[V'], ascending: all tokens, or those that the target wrote most often."""
    if vocab_size <= _LARGEST_VOCABULARY:
        return torch.arange(vocab_size)
    return texts.flatten().bincount(minlength=vocab_size).topk(_LARGEST_VOCABULARY).indices.sort().values


def eagle_shape(config: Any, draft_vocab: int) -> EagleShape:
    """A layer shaped like the target's own, which reads an early, a middle and a late layer."""
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    chosen = (2, layers // 2, layers - 3) if layers >= 16 else (layers // 4, layers // 2, layers - 1)
    rope = getattr(config, "rope_parameters", None) or {}
    return EagleShape(
        vocab_size=config.vocab_size,
        draft_vocab_size=draft_vocab,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=float(rope.get("rope_theta") or getattr(config, "rope_theta", None) or 10_000.0),
        max_position_embeddings=config.max_position_embeddings,
        layers=chosen,
    )
