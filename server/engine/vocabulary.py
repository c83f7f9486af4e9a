"""Whether two models have the same token ids; and the translation for a draft model with another vocabulary.

::

    a token of the target            the draft model reads                     and may propose it
    that it has too                  its own token                             yes
    that it does not have            its longest token with which this ends    no
    that begins a text               its own, else its end-of-text token       no
    that ends a text                 its own: by name, else in order           as many as both have

Tokens are the same if their bytes are, however the tokenizers spell them (``Ġthe`` and ``▁the``, ``Ċ`` and
``<0x0A>``); added tokens if their names are. One token of the target is always one row of the draft model, so that both
share positions and pages.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from foresay.server.engine.parameters import AUTO_VOCAB, drafted
from foresay.server.settings.resolved import BUNDLED, CannotRun
from foresay.server.text.tokenizer import Spelling, tokenizer_file, tokenizer_json
from foresay.verifier.heads.vocabulary import DraftVocabulary
from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.errors import ModelError
from foresay.verifier.model.linear import Linear


def tokenizer(directory: Path) -> Tokenizer | None:
    """The tokenizer in tokenizer.json or tekken.json; None if there is neither. Raises ModelError for a damaged one."""
    try:
        text = tokenizer_json(directory)
        return None if text is None else Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing more specific
        raise ModelError(f"{tokenizer_file(directory)}: not a complete tokenizer ({error})") from error


# -- tokens by their meaning -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenTable:
    """The tokens that a model can read, by id.

    texts: the bytes of each ordinary token. marks: the names of added tokens; special ones are not in ``texts``. begin:
    the token that the tokenizer prepends to a text. ends: end-of-text tokens, the tokenizer's default first. stray:
    tokens for single bytes. sample: a text of English and code, as the tokenizer reads it.
    """

    texts: dict[int, bytes]
    marks: dict[int, str]
    begin: int | None
    ends: tuple[int, ...]
    stray: frozenset[int]
    sample: list[int]

    @classmethod
    def of(cls, backend: Tokenizer, directory: Path, model: ModelConfig) -> TokenTable:
        """The tokens of the tokenizer in a checkpoint's directory."""
        spelling, added = Spelling(backend), backend.get_added_tokens_decoder()
        ids = sorted(id for id in backend.get_vocab(with_added_tokens=True).values() if id < model.vocab_size)
        texts = {id: spelling.raw(id) for id in ids if id not in added or not added[id].special}
        usual = backend.token_to_id(_end_of_text(directory))
        begin = backend.encode("").ids
        return cls(
            texts={id: text for id, text in texts.items() if text},
            marks={id: added[id].content for id in ids if id in added},
            begin=begin[0] if begin and begin[0] in {*ids} - {*model.eos_token_ids} else None,
            ends=tuple(sorted(set(model.eos_token_ids).intersection(ids), key=lambda id: (id != usual, id))),
            stray=frozenset(id for id in texts if spelling.is_stray(id)),
            sample=backend.encode((BUNDLED / "README.md").read_text("utf-8"), add_special_tokens=False).ids,
        )

    def __len__(self) -> int:
        return len(self.texts.keys() | self.marks.keys())

    @cached_property
    def of_text(self) -> dict[bytes, int]:
        """The token for these bytes; of several the first, and a stray one only if there is no other."""
        ids = sorted(self.texts, key=lambda id: (id not in self.stray, -id))
        return {self.texts[id]: id for id in ids}

    @cached_property
    def of_mark(self) -> dict[str, int]:
        """The added token of this name."""
        return {mark: id for id, mark in self.marks.items()}

    def ending_of(self, text: bytes) -> int | None:
        """The longest token that these bytes end with; None if there is none."""
        endings = (self.of_text.get(text[start:]) for start in range(len(text)))
        return next((id for id in endings if id is not None), None)


def _end_of_text(directory: Path) -> str:
    """The ``eos_token`` of tokenizer_config.json; empty if it names none."""
    with suppress(OSError, ValueError, AttributeError):
        named = json.loads((directory / "tokenizer_config.json").read_bytes()).get("eos_token")
        return str(named["content"] if isinstance(named, dict) else named or "")
    return ""


# -- two vocabularies --------------------------------------------------------------------------------------------------

#: A draft model that knows less than this share of what a text consists of is refused: with half of it the bundled one
#: still reached 1.3 tokens per step of 2.1, with a third 1.2, which no longer pays for drafting. Shares of all tokens
#: say little: SmolLM2's are 26 % of Qwen2.5's, and 95 % of what Qwen2.5 makes of an English text.
LEAST_SHARE = 0.5
#: One with less than this share misses noticeably many.
SMALL_SHARE = 0.9


@dataclass(frozen=True, eq=False, slots=True)
class Translation:
    """Between a target with V ids and a draft model.

    read: int64[V], the draft model's id for each of the target's. token_ids: int64[V'], ascending, the target's tokens
    that can be drafted. columns: int64[V'], the draft model's ids of those. tokens: number of the target's tokens.
    share: how much of a text, English and code, can be drafted, from 0 to 1.
    """

    read: Tensor
    token_ids: Tensor
    columns: Tensor
    tokens: int
    share: float

    @classmethod
    def between(cls, target: TokenTable, draft: TokenTable, vocab_size: int) -> Translation:
        """vocab_size: of the target's embedding, which may be larger than its tokenizer's."""
        same = _same(target, draft)
        read = [same[id] if id in same else _stand_in(id, target, draft) for id in range(vocab_size)]
        # Each token of the draft model maps to one token of the target: of several, the one that encoding would give.
        drafted = {own: id for id, own in same.items() if _is_written(id, target)}
        pairs = torch.tensor(sorted((id, own) for own, id in drafted.items()), dtype=torch.int64).reshape(-1, 2)
        can = set(drafted.values())
        share = sum(token in can for token in target.sample) / max(1, len(target.sample))
        return cls(torch.tensor(read), pairs[:, 0], pairs[:, 1], len(target), share)

    @property
    def described(self) -> str:
        """What can be drafted, in words."""
        return f"{len(self.token_ids):,} of the target's {self.tokens:,} tokens, {self.share:.0%} of a text"

    def warning(self, draft: str) -> str:
        """A warning about the draft model ``draft``, if it shares noticeably few tokens."""
        if self.share >= SMALL_SHARE:
            return ""
        return (
            f"--draft {draft} has another vocabulary: it knows only {self.described}, and drafts no others; name a "
            "draft model of the target's family, or --draft suffix, which needs none"
        )


def translation(
    draft: str, target: Path, target_model: ModelConfig, directory: Path, model: ModelConfig, anyway: bool = False
) -> Translation | None:
    """The translation for the draft model ``draft``, in ``directory``; None if the vocabularies are equal, or one is
    unknown. anyway: even if they have little in common.

    Raises CannotRun if they have too little in common, ModelError for a damaged tokenizer.
    """
    one, other = tokenizer(target), tokenizer(directory)
    if one is None or other is None or one.get_vocab() == other.get_vocab():
        return None
    ours, theirs = TokenTable.of(one, target, target_model), TokenTable.of(other, directory, model)
    made = Translation.between(ours, theirs, target_model.vocab_size)
    if (made.share < LEAST_SHARE and not anyway) or not len(made.token_ids):
        raise CannotRun(
            f"--draft {draft} has another vocabulary: it knows only {made.described}, too few to be of use",
            "name a draft model of the target's family, ngram or suffix, or add --anyway to try it",
        )
    return made


def _same(target: TokenTable, draft: TokenTable) -> dict[int, int]:
    """The draft model's id of each token of the target that it shares."""
    same = {id: draft.of_text[text] for id, text in target.texts.items() if text in draft.of_text}
    same |= {id: draft.of_mark[mark] for id, mark in target.marks.items() if mark in draft.of_mark}
    # A token that ends a text in only one of the models differs in meaning, whatever its name.
    same = {id: own for id, own in same.items() if id not in target.ends and own not in draft.ends}
    same.pop(-1 if target.begin is None else target.begin, None)
    return same | _ends(target, draft)


def _ends(target: TokenTable, draft: TokenTable) -> dict[int, int]:
    """Pairs of end-of-text tokens: those with the same name, then the remaining ones in order."""
    named = {draft.marks[own]: own for own in draft.ends if own in draft.marks}
    alike = {id: named[mark] for id in target.ends if (mark := target.marks.get(id)) in named}
    ours = [id for id in target.ends if id not in alike]
    theirs = [own for own in draft.ends if own not in alike.values()]
    return alike | dict(zip(ours, theirs, strict=False))


def _is_written(id: int, target: TokenTable) -> bool:
    return id in target.marks or target.of_text[target.texts[id]] == id


def _stand_in(id: int, target: TokenTable, draft: TokenTable) -> int:
    """What the draft model reads for a token that it lacks."""
    nothing = draft.ends[0] if draft.ends else 0
    if id == target.begin:
        return nothing if draft.begin is None else draft.begin
    if id in target.ends:
        return nothing
    ending = draft.ending_of(target.texts.get(id) or target.marks.get(id, "").encode())
    return nothing if ending is None else ending


def drafted_tokens(head: Linear, setting: str, model: ModelConfig, ids: Tensor | None = None) -> DraftVocabulary | None:
    """The tokens that a drafter with this output matrix drafts; None: all. setting: ``--draft-vocab``. model: its eos
    tokens can be drafted from the start. ids: int64[V'], the target's id of each row. Raises CannotRun where fewer were
    asked for than can be had."""
    count, auto = drafted(head.out_features, setting), setting == AUTO_VOCAB
    if count == head.out_features:
        return None
    if DraftVocabulary.supports(head):
        return DraftVocabulary(head, count, model.eos_token_ids, ids, adaptive=auto)
    if not auto:
        fault = f"--draft-vocab {setting}: here a drafter has logits of all its {head.out_features:,} tokens"
        raise CannotRun(f"{fault}, as on any GPU", "leave it out")
    return None
