"""One training run, from prompts to a model's directory; if it is killed, the same command continues it.

Every random choice is a function of the seed and of the step or batch number, so a run that was interrupted ends with
the same weights as one that was not. Its intermediate files: :mod:`foresay.drafters.training.run_folder`.

The optimizer is AdamW, or Muon for the matrices of a model that has to learn its attention first: the rows of a block
start as masks, without information until a layer attends to the right injected key. AdamW finds that late: after 150
steps on the bundled target a block's first guess was accepted at 32 % of positions, with Muon at 53 %. A head that
reads its feature directly learns slower with Muon (EAGLE-3: 44 and 38 %).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foresay.drafters.heads.dflash_model import DFlashModel
from foresay.drafters.heads.draft_model import StudentModel
from foresay.drafters.heads.eagle_model import EagleModel, PEagleModel
from foresay.drafters.heads.medusa_model import MedusaModel
from foresay.drafters.heads.training_batch import DepthMetrics, Evaluation, TrainingBatch
from foresay.drafters.training import files
from foresay.drafters.training.progress import ProgressBar
from foresay.drafters.training.run_folder import RunFolder
from foresay.drafters.training.settings import HELD_OUT, Settings
from foresay.drafters.training.shapes import dflash_shape, draft_shape, draft_vocabulary, eagle_shape
from foresay.drafters.training.teacher import Example, Teacher, TrainingBatches
from foresay.spec.errors import ForesayError
from foresay.spec.names import DFLASH, DRAFT_MODEL, EAGLE3, MEDUSA, PEAGLE
from foresay.verifier.heads.layouts import ACCEPTANCE

Model = MedusaModel | EagleModel | DFlashModel | StudentModel

#: Seconds between two saved states.
_SAVED_EVERY = 60.0
#: The most held-out texts used for evaluation.
_JUDGED = 64
_LEARNERS = {
    MEDUSA: "training the Medusa heads",
    EAGLE3: "training the EAGLE-3 head",
    PEAGLE: "training the P-EAGLE head",
    DFLASH: "training the DFlash head",
    DRAFT_MODEL: "training the draft model",
}


class Run:
    """The phases of a run, each resumable. progress: whether it is shown on stderr."""

    def __init__(self, settings: Settings, teacher: Teacher, work: RunFolder, progress: bool = True) -> None:
        self.settings, self.teacher = settings, teacher
        self._work, self._progress = work, progress

    def __call__(self) -> Evaluation:
        """Generate texts, train, evaluate and publish; returns the model's quality on held-out text."""
        texts = self.texts()
        learned = [text for number, text in enumerate(texts) if number % HELD_OUT]
        model = self.model(learned).to(self.teacher.device)
        self.train(model, self._batches(learned, model.needs))
        judged = self.evaluate(model, texts[::HELD_OUT])
        self._publish(model, judged)
        self._work.remove()
        return judged

    def _publish(self, model: Model, judged: Evaluation) -> None:
        teacher, config = self.teacher, model.config(self.settings.target)
        if not isinstance(model, StudentModel):
            config[ACCEPTANCE] = judged.acceptance
        parts: dict[str, files.Writer] = {}
        if isinstance(model, StudentModel):
            parts = {file.name: files.copy(file) for file in teacher.tokenizer_files}
            config |= teacher.special_tokens
        name = "medusa_lm_head.safetensors" if isinstance(model, MedusaModel) else "model.safetensors"
        parts[name] = files.weights(model.published(), teacher.stored_dtype)
        parts["config.json"] = files.text({**config, "dtype": str(teacher.stored_dtype).removeprefix("torch.")})
        files.publish(self._work.out, parts)

    def _batches(self, texts: Sequence[Example], needs: Sequence[str]) -> TrainingBatches:
        """The batches of texts, whose states the target computes now if they are kept."""
        batches = TrainingBatches(self.teacher, texts, needs, self.settings.batch, 2 * self.settings.depth + 2)
        if batches.keeps_states:
            with ProgressBar("reading the texts with the target", len(texts), "texts", 0, self._progress) as bar:
                batches.read(self._work.states, bar.to)
        return batches

    def texts(self) -> list[Example]:
        """The texts that the target generated."""
        prompts, size = self._prompts(), self.settings.together
        batches = [prompts[start : start + size] for start in range(0, len(prompts), size)]
        there = sum(len(batch) for number, batch in enumerate(batches) if self._work.text(number).exists())
        texts: list[Example] = []
        with ProgressBar("generating texts with the target", len(prompts), "texts", there, self._progress) as bar:
            for number, batch in enumerate(batches):
                texts += self._batch(batch, number, bar)
        return texts

    def _prompts(self) -> list[list[int]]:
        """One randomly chosen prompt per sample, sorted by length, since the prompts of a batch are padded."""
        prompts = self.teacher.prompts(Path(self.settings.prompts), self.settings.length)
        generator = torch.Generator().manual_seed(self.settings.seed)
        order = torch.randperm(len(prompts), generator=generator).tolist()
        return sorted((prompts[order[i % len(order)]] for i in range(self.settings.samples)), key=len)

    def _batch(self, prompts: list[list[int]], number: int, bar: ProgressBar) -> list[Example]:
        path, settings, before = self._work.text(number), self.settings, bar.done
        if not path.exists():
            generator = torch.Generator(self.teacher.device).manual_seed(settings.seed * 1_000_003 + number)
            temperature = settings.temperatures[number % len(settings.temperatures)]

            def progress(share: float) -> None:
                bar.to(before + int(share * len(prompts)))

            written = self.teacher.write(prompts, settings.length, temperature, generator, progress)
            files.save(path, [tuple(text) for text in written])
            bar.to(before + len(prompts))
        return [Example(*text) for text in files.load(path)]

    def model(self, texts: Sequence[Example]) -> Model:
        """A new model to be trained."""
        torch.manual_seed(self.settings.seed)
        teacher, settings = self.teacher, self.settings
        if settings.kind == MEDUSA:
            return MedusaModel(teacher.lm_head, settings.depth)
        if settings.kind == DRAFT_MODEL:
            assert settings.layers is not None and settings.width is not None
            return StudentModel(draft_shape(teacher.config, settings.layers, settings.width))
        written = torch.cat([text.tokens[text.start :] for text in texts])
        ids = draft_vocabulary(written, teacher.config.vocab_size, settings.vocabulary).to(teacher.device)
        if settings.kind == DFLASH:
            assert settings.layers is not None
            shape = dflash_shape(teacher.config, settings.layers, settings.depth, len(ids))
            return DFlashModel(shape, teacher.embedding, ids, teacher.lm_head)
        made = PEagleModel if settings.kind == PEAGLE else EagleModel
        return made(eagle_shape(teacher.config, len(ids)), teacher.embedding, ids, teacher.lm_head, settings.depth)

    def train(self, model: Model, batches: TrainingBatches) -> None:
        """Run all steps that are left."""
        settings, path = self.settings, self._work.state
        matrices = model.matrices() if isinstance(model, DFlashModel) else []
        optimizer = Optimizers(filter(lambda each: each.requires_grad, model.parameters()), matrices, settings.rate)
        first = self._resumed(model, optimizer, path)
        saved = time.monotonic()
        with ProgressBar(_LEARNERS[settings.kind], settings.steps, "steps", first, self._progress) as bar:
            for step in range(first, settings.steps):
                loss = self._step(model, optimizer, batches, step)
                if not math.isfinite(loss):
                    raise ForesayError(f"step {step + 1}: the loss is {loss}; start again with a lower --rate")
                bar.to(step + 1, f"loss {loss:.3f}")
                if time.monotonic() - saved > _SAVED_EVERY:
                    self._save(model, optimizer, path, step + 1)
                    saved = time.monotonic()
        if first < settings.steps:
            self._save(model, optimizer, path, settings.steps)

    @torch.enable_grad()
    def _step(self, model: Model, optimizer: Optimizers, batches: TrainingBatches, step: int) -> float:
        total = 0.0
        with self._half():
            for loss in _losses(model, batches.batch_at(step, self.settings.seed), step / self.settings.steps):
                loss.backward()
                total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(rate_at(step, self.settings.steps))
        return total

    def _half(self) -> torch.autocast:
        """Products in bf16, where that is faster; weights and sums stay fp32."""
        device = self.teacher.device
        able = torch.cpu.get_capabilities()
        native = device != "cpu" or able.get("avx512_bf16") or able.get("amx_bf16") or able.get("bf16")
        return torch.autocast(device, torch.bfloat16, enabled=bool(native))

    def _resumed(self, model: Model, optimizer: Optimizers, path: Path) -> int:
        """The first step to do; restores weights and optimizer."""
        if not path.exists():
            return 0
        state = files.load(path)
        try:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            return int(state["step"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise files.damaged(path) from error

    def _save(self, model: Model, optimizer: Optimizers, path: Path, step: int) -> None:
        files.save(path, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step})

    def evaluate(self, model: Model, texts: Sequence[Example]) -> Evaluation:
        """Evaluate on held-out texts: means for each depth."""
        generator, settings = torch.Generator(self.teacher.device).manual_seed(0), self.settings
        texts = texts[:: -(-len(texts) // _JUDGED)]
        batches = TrainingBatches(self.teacher, texts, model.needs, settings.batch, 2 * settings.depth + 2)
        found: list[list[DepthMetrics]] = []
        with ProgressBar("judging it on held-out texts", len(texts), "texts", 0, self._progress) as bar:
            for batch in batches.all():
                found.append(model.evaluate(batch, generator))
                bar.to(min(len(texts), len(found) * settings.batch))
        depths = [_mean([depths[number] for depths in found]) for number in range(len(found[0]))]
        return Evaluation(depths, len(texts), sum(len(text.tokens) - text.start for text in texts))


def _mean(depths: list[DepthMetrics]) -> DepthMetrics:
    count = len(depths)
    return DepthMetrics(*(sum(getattr(one, name) for one in depths) / count for name in ("loss", "greedy", "sampled")))


def _losses(model: Model, batch: TrainingBatch, done: float) -> Iterator[Tensor]:
    """done: the completed share of the run, which decides how many passes of an EAGLE-3 head are trained."""
    return model.losses(batch, done) if isinstance(model, EagleModel) else model.losses(batch)


def rate_at(step: int, steps: int) -> float:
    """The learning rate's factor: a short warm-up, then a cosine decay to a twentieth."""
    warm = max(1, min(100, steps // 10))
    if step < warm:
        return (step + 1) / warm
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


class Muon(torch.optim.Optimizer):
    """Momentum orthogonalised by Newton-Schulz (Jordan et al., 2024), scaled to AdamW's step size.

    ``torch.optim.Muon`` does the iteration in bf16, five times slower than fp32 on a CPU without bf16 instructions.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonal(p.grad.lerp(buffer, group["momentum"]))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * 0.2 * max(p.shape) ** 0.5)


def orthogonal(g: Tensor, iterations: int = 5) -> Tensor:
    """Approximately the nearest semi-orthogonal matrix to ``g``: a quintic Newton-Schulz iteration."""
    x: Tensor = g.mT if g.shape[0] > g.shape[1] else g
    x = x / (torch.linalg.vector_norm(x) + 1e-7)
    for _ in range(iterations):
        a = x @ x.mT
        x = torch.addmm(x, torch.addmm(a, a, a, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.mT if g.shape[0] > g.shape[1] else x


class Optimizers:
    """Several optimizers that step together. parameters: Muon gets those in ``matrices``, AdamW the others."""

    def __init__(self, parameters: Iterable[nn.Parameter], matrices: Iterable[nn.Parameter], rate: float) -> None:
        by_muon = list(matrices)
        chosen = {id(parameter) for parameter in by_muon}
        rest = [parameter for parameter in parameters if id(parameter) not in chosen]
        self._parts: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
        ]
        if by_muon:
            self._parts.append(Muon(by_muon, lr=rate))
        self._rate = rate

    def step(self, factor: float) -> None:
        """Step with ``factor`` times the rate, and clear the gradients."""
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = self._rate * factor
            part.step()
            part.zero_grad()

    def state_dict(self) -> list[dict[str, Any]]:
        return [part.state_dict() for part in self._parts]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Raises ValueError or TypeError for states of other parameters."""
        for part, state in zip(self._parts, states, strict=True):
            part.load_state_dict(state)
