"""Text for the bundled pair: children's stories and worked maths answers, as one stream of token ids.

``<|endoftext|>`` separates the stories. A maths question and its answer become one chat turn, in the form of the chat
template, so that ``/v1/chat/completions`` sends a form the models have seen.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT, END, SYSTEM, USER, ASSISTANT = "<|endoftext|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = [END_OF_TEXT, END, SYSTEM, USER, ASSISTANT]
VOCAB_SIZE = 4096

#: One message is ``<|role|>content<|end|>``; generation starts after ``<|assistant|>``.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def stories(path: Path) -> list[str]:
    """The books of the stories file, each without surrounding white space."""
    return [book.strip() for book in path.read_text(encoding="utf-8").split(END_OF_TEXT) if book.strip()]


def maths_turns(path: Path) -> list[str]:
    """Each question and answer as one chat turn, without the calculator marks (``<<48/2=24>>``)."""
    turns = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        answer = re.sub(r"<<.*?>>", "", row["answer"]).replace("\n#### ", "\nThe answer is ") + "."
        turns.append(f"{USER}{row['question'].strip()}{END}{ASSISTANT}{answer}{END}")
    return turns


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE of 4,096 entries, the special tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str], end: str) -> np.ndarray:
    """All texts as one uint16 stream, each followed by the token ``end``."""
    end_id = tokenizer.token_to_id(end)
    encodings = tokenizer.encode_batch(texts)
    return np.concatenate([np.array([*e.ids, end_id], dtype=np.uint16) for e in encodings])


def split_pieces(text: str, size: int = 20_000) -> list[str]:
    """A book cut at paragraph ends into pieces of about ``size`` characters."""
    pieces, current, length = [], [], 0
    for paragraph in text.split("\n\n"):
        current.append(paragraph)
        length += len(paragraph)
        if length > size:
            pieces.append("\n\n".join(current))
            current, length = [], 0
    return [*pieces, "\n\n".join(current)] if current else pieces
