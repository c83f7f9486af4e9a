"""Prompts to train a real model's heads with: ``python -m bench.chats --text DIR --out prompts.jsonl``.

A third each of maths (questions of ``gsm8k_train.jsonl``), chat (tasks about topics, and passages of stories) and code
(programs to write, and functions of Python's standard library to complete), as chats of one turn, in the form that
``foresay train --prompts`` reads. None of them is in what the benches measure on (MT-bench, GSM8K's test, HumanEval).
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_PHRASES = json.loads(Path(__file__).with_name("chats.json").read_text("utf-8"))
#: Characters of a function's head and docstring, and of a passage: fewer and more are left out.
_HEAD, _PASSAGE = range(61, 700), range(251, 900)


def functions() -> Iterator[str]:
    """Head and docstring of each function that stands alone in a file of the standard library."""
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        source = file.read_text("utf-8", "replace")
        lines = source.splitlines()
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and not node.decorator_list:
                text = "\n".join(lines[node.lineno - 1 : node.body[0].end_lineno])
                if len(text) in _HEAD:
                    yield text


def code(count: int, chance: random.Random) -> list[str]:
    """Functions to complete, and as many programs to write, if there are enough of each."""
    heads = [chance.choice(_PHRASES["about_a_function"]).format(t=text) for text in functions()]
    programs = [how.format(t=what) for how in _PHRASES["about_a_program"] for what in _PHRASES["programs"]]
    chance.shuffle(programs)
    return chance.sample(heads, min(len(heads), count - min(len(programs), count // 2))) + programs[: count // 2]


def chat(stories: Path, count: int, chance: random.Random) -> list[str]:
    """Tasks about topics, and one in five about a passage of a story."""
    found: set[str] = set()
    while len(found) < count * 4 // 5:
        topic, other = chance.sample(_PHRASES["topics"], 2)
        found.add(chance.choice(_PHRASES["about_a_topic"]).format(t=topic, u=other))
    tasks = sorted(found)
    chance.shuffle(tasks)
    parts = (" ".join(part.split()) for part in stories.read_text("utf-8").split("\n\n"))
    passages = chance.sample([part for part in parts if len(part) in _PASSAGE], count - len(tasks))
    return tasks + [chance.choice(_PHRASES["about_a_passage"]).format(t=passage) for passage in passages]


def maths(questions: Path, count: int, chance: random.Random) -> list[str]:
    """Questions."""
    found = [str(json.loads(line)["question"]) for line in questions.read_text("utf-8").splitlines()]
    return chance.sample(found, count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="folder of pd_children_stories.txt, gsm8k_train.jsonl")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=1600, help="of each kind (default: 1600)")
    args = parser.parse_args()
    chance = random.Random(0)
    prompts = maths(args.text / "gsm8k_train.jsonl", args.count, chance)
    prompts += chat(args.text / "pd_children_stories.txt", args.count, chance) + code(args.count, chance)
    chance.shuffle(prompts)
    lines = ({"messages": [{"role": "user", "content": prompt}]} for prompt in prompts)
    args.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
