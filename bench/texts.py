"""The texts of ``bench budget``, round after round: recorded ones, made ones, and prompts to continue.

::

    fresh     no token occurs twice
    edits     a given text with one token in ten replaced, three times as long as other answers
    dialogue  turns of tool-calling dialogues (DIR/*.json)
    repeated  answers to one question again (DIR/*.jsonl), in the ids of another vocabulary
    drawn     prompts of the bench, continued by the target
    again     the same, and each once more with the same seed, as by clients that retry or compare

DIR holds ``*.jsonl`` of ``{"prompt_token_ids" or "input_token_ids": [...], "output_token_ids": [...]}``, and ``*.json``
of tool-calling dialogues (a list of ``{"traj": [{"role": ..., "content": ..., "tool_calls": ...}]}``), which are
tokenised; each message of the assistant is a request.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path

from tokenizers import Tokenizer

from bench import BadOption, prompts
from foresay.server.settings.resolved import BUNDLED

FIRST_TEXT_ID = 16  # ids below are special tokens, in most vocabularies
#: Of a repeated answer: the end of its prompt that is kept. Of dialogues: the most tokens before the first turn that is
#: written, the shortest turn that counts, how many of one are written, and the longest text.
PROMPT, BEFORE, SHORTEST, TURNS, LONGEST = 256, 1024, 24, 3, 3500
#: Answers in a round of the repeated ones, and where in them these begin: after a constant beginning.
REPEATED, BEGIN = 3, 512
#: Of an edited text, answers of the usual length: a round writes as much of it as of the other copied texts.
EDITED = 3

#: A prompt, and the answer that is to be written; an empty one where the target chooses it.
Exchange = tuple[list[int], list[int]]
#: For each round the requests of each mode, one after the other.
Workload = Iterator[list[Exchange]]


def workloads(
    traces: Path | None, tokenizer: Path, length: int, seed: int, vocab: int, room: int
) -> dict[str, Workload]:
    """Those whose texts are there and long enough, without end.

    traces: directory of the recorded ones; tokenizer: the target's directory; length: tokens of each answer, but of
    edits (``EDITED``); room: tokens that the target holds.
    """
    rng, most = random.Random(seed), min(vocab, 4096)
    made: dict[str, Workload] = {
        "fresh": _made(lambda: fresh(most, rng, length)),
        "edits": _made(lambda: copy_heavy(most, rng, min(EDITED * length, room // 2))),
        "drawn": _drawn(tokenizer),
        "again": ([*exchanges, *exchanges] for exchanges in _drawn(tokenizer)),
    }
    for file in sorted(traces.glob("*.json*")) if traces else ():
        if file.suffix == ".json":
            if turns := dialogues(list(requests(file, 100, length)), min(LONGEST, room - length)):
                made["dialogue"] = cycle(turns)
        else:
            answers = renamed(list(requests(file, 8, BEGIN + length)), vocab)
            if long := [answer for answer in answers if len(answer[1]) > BEGIN + 1]:
                made["repeated"] = _repeated(long, rng, length)
    return made


def fresh(vocab: int, rng: random.Random, length: int) -> Exchange:
    """Prompt and answer without any token twice: lookups never pay."""
    tokens = rng.sample(range(FIRST_TEXT_ID, vocab), 2 * length)
    return tokens[:length], tokens[length:]


def copy_heavy(vocab: int, rng: random.Random, length: int) -> Exchange:
    """The prompt quoted in order, about one token in ten replaced."""
    prompt = [rng.randrange(FIRST_TEXT_ID, vocab) for _ in range(length)]
    return prompt, [token if rng.random() < 0.9 else rng.randrange(FIRST_TEXT_ID, vocab) for token in prompt]


def edited(text: str, rng: random.Random, rate: float) -> str:
    """The text with a share ``rate`` of its words, and a fifth of that share of its lines, replaced, left out, or
    followed by another one."""
    words = _changed(text.split(" "), rng, rate)
    return "\n".join(_changed(" ".join(words).split("\n"), rng, rate / 5))


def _changed(items: Sequence[str], rng: random.Random, rate: float) -> list[str]:
    out: list[str] = []
    for item in items:
        change = rng.choice(("replaced", "left out", "followed")) if rng.random() < rate else None
        if change in (None, "followed"):
            out.append(item)
        if change in ("replaced", "followed"):
            out.append(rng.choice(items))
    return out


def requests(file: Path, most: int, longest: int) -> Iterator[Exchange]:
    """The first requests of a file, with the first ``longest`` tokens of their answers."""
    if file.suffix == ".jsonl":
        for line in file.read_text("utf-8").splitlines()[:most]:
            row = json.loads(line)
            yield row.get("prompt_token_ids") or row["input_token_ids"], row["output_token_ids"][:longest]
        return
    tokenizer = Tokenizer.from_file(str(BUNDLED / "target" / "tokenizer.json"))
    for dialogue in json.loads(file.read_text("utf-8"))[:most]:
        prompt: list[int] = []
        for message in dialogue["traj"]:
            calls = [call["function"] for call in message.get("tool_calls") or []]
            text = f"{message['role']}\n{message.get('content') or ''}{json.dumps(calls) if calls else ''}\n"
            tokens = tokenizer.encode(text, add_special_tokens=False).ids
            if message["role"] == "assistant":
                yield prompt, tokens[:longest]
            prompt = prompt + tokens


def dialogues(exchanges: Sequence[Exchange], longest: int = LONGEST) -> list[list[Exchange]]:
    """Some consecutive turns from the middle of each dialogue, of those that fit."""
    whole: list[list[Exchange]] = []
    for prompt, output in exchanges:
        if not whole or len(prompt) < len(whole[-1][-1][0]):
            whole.append([])
        whole[-1].append((prompt, output))
    found = []
    for turns in whole:
        kept = [turn for turn in turns if len(turn[1]) >= SHORTEST]
        window = kept[max(0, (len(kept) - TURNS) // 2) :][:TURNS]
        begin = max(0, len(window[0][0]) - min(BEFORE, longest * 2 // 3)) if window else 0
        if len(window) == TURNS and len(window[-1][0]) - begin < longest:
            found.append([(prompt[begin:], output) for prompt, output in window])
    return found


def renamed(exchanges: list[Exchange], vocab: int) -> list[Exchange]:
    """The same texts in ids of this vocabulary, the same everywhere; by first appearance, so that no two become one."""
    names: dict[int, int] = {}
    for prompt, output in exchanges:
        for token in (*prompt, *output):
            names.setdefault(token, FIRST_TEXT_ID + len(names))
    if len(names) + FIRST_TEXT_ID > vocab:
        raise BadOption(f"the texts hold {len(names)} different tokens, the target has {vocab}: take shorter ones")
    return [([names[token] for token in prompt], [names[token] for token in output]) for prompt, output in exchanges]


def _drawn(tokenizer: Path) -> Workload:
    """An opening of a story and a question in each round."""
    texts = cycle(prompts.encoded(tokenizer).values())
    while True:
        yield [(prompt, []) for prompt in islice(texts, 2)]


def _made(make: Callable[[], Exchange]) -> Workload:
    while True:
        yield [make()]


def _repeated(exchanges: list[Exchange], rng: random.Random, length: int) -> Workload:
    """Some of the answers in random order, from the same position on."""
    while True:
        chosen = rng.sample(exchanges, min(REPEATED, len(exchanges)))
        yield [([*prompt, *output[:BEGIN]][-PROMPT:], output[BEGIN : BEGIN + length]) for prompt, output in chosen]
