"""The texts of a run as training batches, step by step: each comes once per epoch, together with others of similar
length.

A target's pass over a text costs as much as training a head on it, so its states are kept in bf16 if they are not too
large: on a CPU in the run's folder, on a GPU, which computes them all in seconds, in its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from foresay.drafters.heads.lesson import Lesson
from foresay.drafters.training import files
from foresay.drafters.training.teacher import Teacher, Text, with_final

#: The most bytes of states that are kept on a CPU; the share of a GPU's free memory; texts per file of states.
_KEPT_AT_MOST, _SHARE = 12 << 30, 0.5
TEXTS_IN_FILE = 128


class Lessons:
    """Lessons from texts. needs: features by name. batch: texts in a step. room: padding rows after the longest one."""

    def __init__(self, teacher: Teacher, texts: Sequence[Text], needs: Sequence[str], batch: int, room: int) -> None:
        self._teacher, self._texts, self._needs, self._room = teacher, texts, needs, room
        order = sorted(range(len(texts)), key=lambda number: len(texts[number].tokens))
        self._groups = [order[start : start + batch] for start in range(0, len(order), batch)]
        self._known: list[Tensor] = []
        self._likeliest: dict[int, Tensor] = {}

    def at(self, step: int, seed: int) -> Lesson:
        """The lesson of a step: each epoch has all groups, in its own order."""
        turn, index = divmod(step, len(self._groups))
        generator = torch.Generator().manual_seed(seed * 1_000_033 + turn)
        return self._of(int(torch.randperm(len(self._groups), generator=generator)[index]))

    def all(self) -> Iterator[Lesson]:
        """The lessons of all groups."""
        yield from map(self._of, range(len(self._groups)))

    def _of(self, number: int) -> Lesson:
        group = self._groups[number]
        known = [self._known[text] for text in group] if self._known else ()
        lesson = self._teacher.lesson([self._texts[text] for text in group], self._needs, self._room, known)
        if not known:
            return lesson
        if number not in self._likeliest:  # a product with the whole vocabulary, once and not in every epoch
            self._likeliest[number] = lesson.likeliest_tokens()
        return replace(lesson, likeliest=self._likeliest[number])

    @property
    def kept(self) -> bool:
        """Whether the target's states of all texts are kept."""
        names = with_final(self._needs)
        size: int = sum(len(text.tokens) for text in self._texts) * len(names) * self._teacher.config.hidden_size * 2
        if self._in_files:
            return size <= _KEPT_AT_MOST
        return size <= _SHARE * torch.cuda.mem_get_info(self._teacher.device)[0]

    @property
    def _in_files(self) -> bool:
        return self._teacher.device == "cpu"

    def read(self, file: Callable[[int], Path], shown: Callable[[int], None]) -> None:
        """Run the target over every text that it has not read yet. file: the file of states by number. shown: called
        with the number of texts read."""
        if self._in_files:
            self._read_to_files(file, shown)
        else:
            self._read_groups(shown)

    def _read_groups(self, shown: Callable[[int], None]) -> None:
        """One step's texts at a time; their states stay on the device."""
        known: dict[int, Tensor] = {}
        for group in self._groups:
            states = self._states(pad_sequence([self._texts[text].tokens for text in group], batch_first=True))
            known |= {
                text: rows[: len(self._texts[text].tokens)].clone() for text, rows in zip(group, states, strict=True)
            }
            shown(len(known))
        self._known = [known[text] for text in range(len(self._texts))]

    def _read_to_files(self, file: Callable[[int], Path], shown: Callable[[int], None]) -> None:
        for number, start in enumerate(range(0, len(self._texts), TEXTS_IN_FILE)):
            path, texts = file(number), self._texts[start : start + TEXTS_IN_FILE]
            if not path.exists():
                states: list[Tensor] = []
                for text in texts:
                    states.append(self._states(text.tokens[None])[0].clone())
                    shown(start + len(states))
                files.save(path, states)
            self._known += files.load(path)
            shown(start + len(texts))

    def _states(self, tokens: Tensor) -> Tensor:
        return self._teacher.states(tokens, with_final(self._needs)).bfloat16()
