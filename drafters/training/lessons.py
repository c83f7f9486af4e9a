"""The texts of a run as lessons, step by step: each comes once in a round, beside others of like length.

Reading a text costs the target as much as learning from it costs a head, so what it thinks of each is kept in bf16
where that is not too much: on a CPU in the run's folder, on a GPU, which reads them all in seconds, in its memory.
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

#: Bytes of states that are kept on a CPU, at most; the share of a GPU's free memory; texts in one file of them.
_KEPT_AT_MOST, _SHARE = 12 << 30, 0.5
TEXTS_IN_FILE = 128


class Lessons:
    """Lessons from texts. needs: features by name. batch: texts in a step. room: rows behind the longest one."""

    def __init__(self, teacher: Teacher, texts: Sequence[Text], needs: Sequence[str], batch: int, room: int) -> None:
        self._teacher, self._texts, self._needs, self._room = teacher, texts, needs, room
        order = sorted(range(len(texts)), key=lambda number: len(texts[number].tokens))
        self._groups = [order[start : start + batch] for start in range(0, len(order), batch)]
        self._known: list[Tensor] = []
        self._likeliest: dict[int, Tensor] = {}

    def at(self, step: int, seed: int) -> Lesson:
        """That of a step: in every round all groups come, in an order of its own."""
        turn, place = divmod(step, len(self._groups))
        generator = torch.Generator().manual_seed(seed * 1_000_033 + turn)
        return self._of(int(torch.randperm(len(self._groups), generator=generator)[place]))

    def all(self) -> Iterator[Lesson]:
        """Those of all groups."""
        yield from map(self._of, range(len(self._groups)))

    def _of(self, number: int) -> Lesson:
        group = self._groups[number]
        known = [self._known[text] for text in group] if self._known else ()
        lesson = self._teacher.lesson([self._texts[text] for text in group], self._needs, self._room, known)
        if not known:
            return lesson
        if number not in self._likeliest:  # a product with all of the vocabulary, once and not in every round
            self._likeliest[number] = lesson.likeliest_tokens()
        return replace(lesson, likeliest=self._likeliest[number])

    @property
    def kept(self) -> bool:
        """Whether what the target thinks of all texts is to be kept."""
        names = with_final(self._needs)
        size: int = sum(len(text.tokens) for text in self._texts) * len(names) * self._teacher.config.hidden_size * 2
        if self._in_files:
            return size <= _KEPT_AT_MOST
        return size <= _SHARE * torch.cuda.mem_get_info(self._teacher.device)[0]

    @property
    def _in_files(self) -> bool:
        return self._teacher.device == "cpu"

    def read(self, file: Callable[[int], Path], shown: Callable[[int], None]) -> None:
        """Have the target read every text that it has not read yet. file: where states are kept, by number. shown: is
        given how many texts are read."""
        if self._in_files:
            self._read_to_files(file, shown)
        else:
            self._read_groups(shown)

    def _read_groups(self, shown: Callable[[int], None]) -> None:
        """A step's texts at once, whose states stay where they are made."""
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
