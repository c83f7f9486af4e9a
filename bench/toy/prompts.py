"""Prompts to train the bundled heads with: ``python -m bench toy.prompts --text DIR --out prompts.jsonl``.

Beginnings of paragraphs of the stories and questions of the maths text, three to one, in the form that ``foresay
train --prompts`` reads. None of them is in ``bench/prompts.jsonl``.
"""

from __future__ import annotations

import json
import random
from argparse import ArgumentParser, Namespace
from pathlib import Path

from bench.toy import data

#: Words in the beginning of a paragraph, at least and at most, and in a paragraph that is long enough to have one.
_SHORTEST, _LONGEST, _ENOUGH = 6, 45, 60


def beginnings(books: list[str], count: int, chance: random.Random) -> list[str]:
    """The first words of ``count`` random paragraphs."""
    paragraphs = [words for book in books for part in book.split("\n\n") if len(words := part.split()) >= _ENOUGH]
    return [" ".join(words[: chance.randint(_SHORTEST, _LONGEST)]) for words in chance.sample(paragraphs, count)]


def questions(path: Path, count: int, chance: random.Random) -> list[str]:
    """``count`` random questions."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["question"].strip() for line in chance.sample(lines, count)]


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--text", type=Path, required=True, help="folder of pd_children_stories.txt, gsm8k_train.jsonl")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=4096)


def main(args: Namespace) -> None:
    chance = random.Random(0)
    books = data.stories(args.text / "pd_children_stories.txt")
    chats = questions(args.text / "gsm8k_train.jsonl", args.count // 4, chance)
    lines: list[dict[str, object]] = [{"messages": [{"role": "user", "content": chat}]} for chat in chats]
    lines += [{"prompt": text} for text in beginnings(books, args.count - len(chats), chance)]
    args.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
