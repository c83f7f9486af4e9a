from __future__ import annotations

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from foresay.server.text.tokenizer import Tokenizer

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SAMPLE = ["Once upon a time there was a fox. The fox said: 'Who stole the tart?'", "naïve café, 你好 世界, 🦊🦊"]
SPECIAL = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]


def byte_level_tokenizer(template: str = TEMPLATE) -> Tokenizer:
    """A small byte-level BPE, a chat template, and <|end|> (id 0) as the end of text."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(SAMPLE * 3, trainer)
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, eos_token="<|end|>"))


def sentencepiece_tokenizer() -> Tokenizer:
    """A tokenizer in the way of Llama 2: spaces as U+2581, other characters as byte tokens."""
    specials = ["<unk>", "<s>", "</s>"]
    pieces = [*specials, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz", "▁a", "▁b"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    backend = Backend(
        models.BPE(vocab=vocabulary, merges=[("▁", "a"), ("▁", "b")], unk_token="<unk>", byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(special, special=True) for special in specials])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"))


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    return sentencepiece_tokenizer()
