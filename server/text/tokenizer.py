"""The target's tokenizer: text to ids, ids to text, messages to a prompt.

Everything here may run in other threads: the Rust tokenizer is shared and never reconfigured. It is called with batches
of one, since only batches release the interpreter's lock. For a checkpoint with only Mistral's ``tekken.json``,
transformers reads its vocabulary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec

from foresay.server.catalog.formats import TOOLS_VARIABLES
from foresay.server.text.prompt import ControlTokens, RenderedPrompt, Room
from foresay.spec.errors import InvalidRequest
from foresay.verifier.model.errors import ModelError, code_refused

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

#: Special tokens that templates and prompts expect, for lack of a tokenizer_config.json.
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}


def tokenizer_file(directory: Path) -> Path | None:
    """The file with a checkpoint's vocabulary; None if there is none."""
    files = (directory / name for name in ("tokenizer.json", "tekken.json"))
    return next((file for file in files if file.exists()), None)


def tokenizer_json(directory: Path) -> str | None:
    """The text of ``tokenizer.json``, or of ``tekken.json`` converted to it; None if a checkpoint has neither."""
    file = tokenizer_file(directory)
    if file is None or file.name == "tokenizer.json":
        return None if file is None else file.read_text("utf-8")
    return _converted(file, file.stat().st_mtime_ns)


@lru_cache(maxsize=2)
def _converted(file: Path, changed: int) -> str:
    """Slow (seconds): merges are computed for all tokens. changed: the file's modification time, for the cache."""
    from transformers.integrations.mistral.tokenizer import MistralConverter

    return str(MistralConverter(str(file)).converted().to_str())


#: Models' tokens for filling in the middle: before the prefix, before the suffix, before the text between them.
_INFILL = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)

#: Usual values for a model without recommendations.
_USUAL = {"temperature": 0.7, "top_p": 0.95}


class SamplingDefaults(msgspec.Struct, frozen=True):
    """Recommendations of the model's ``generation_config.json``; None for missing ones."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None

    @classmethod
    def read(cls, directory: Path) -> SamplingDefaults:
        """Read them from a checkpoint directory; a missing file means no recommendations."""
        path = directory / "generation_config.json"
        if not path.exists():
            return cls()
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except msgspec.MsgspecError as error:
            raise ModelError(f"{path} cannot be read: {error}") from error

    def for_people(self) -> SamplingDefaults:
        """With usual values for missing recommendations, as chat, generate and the page sample. The API has OpenAI's
        defaults instead."""
        unset = {name: value for name, value in _USUAL.items() if getattr(self, name) is None}
        return msgspec.structs.replace(self, **unset)


#: The class of transformers that uses tokenizer.json unchanged, and its names in checkpoints.
AS_STORED = "PreTrainedTokenizerFast"
_NO_CLASS_OF_ITS_OWN = (AS_STORED, "TokenizersBackend")


class _About(msgspec.Struct):
    """Fields of tokenizer_config.json or config.json."""

    tokenizer_class: str | None = None
    model_type: str | None = None
    auto_map: Any = None


def loader_of(directory: Path) -> str:
    """The transformers class for a checkpoint's tokenizer. ``AutoTokenizer`` takes half a second to import; for a
    checkpoint without a class of its own it chooses the plain one anyway, except for some families that it
    overrides; the directories that we make of GGUF files name no family."""
    try:
        about, model = (
            msgspec.json.decode((directory / name).read_bytes(), type=_About)
            for name in ("tokenizer_config.json", "config.json")
        )
    except (OSError, msgspec.MsgspecError):  # AutoTokenizer reports it
        return "AutoTokenizer"
    plain = about.tokenizer_class in _NO_CLASS_OF_ITS_OWN and model.model_type in (None, "llama", "qwen3")
    return AS_STORED if plain and not (about.auto_map or model.auto_map) else "AutoTokenizer"


class Tokenizer:
    """Encodes, decodes and renders chat templates. Thread-safe."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._templates = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()  # tokenizer.json may enable either
        self._backend.no_padding()
        self._control = ControlTokens(self._backend)
        added = self._backend.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(token for token, entry in added.items() if entry.special)
        self._added: dict[str, int] = {entry.content: token for token, entry in added.items()}
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)
        self._spelling = Spelling(self._backend)

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Load from a checkpoint directory. Raises :class:`ModelError` if it has no usable tokenizer."""
        import transformers  # costs seconds: not before a server needs it

        loader = getattr(transformers, loader_of(directory))
        file = tokenizer_file(directory)
        special = SPECIAL if file is not None and file.name != "tokenizer.json" else {}
        try:
            tokenizer = loader.from_pretrained(directory, local_files_only=True, trust_remote_code=False, **special)
        except Exception as error:  # for a damaged tokenizer.json the library raises nothing more specific
            reason = code_refused("tokenizer_config.json", error) or error
            raise ModelError(f"the tokenizer in {directory} cannot be loaded: {reason}") from error
        if not getattr(tokenizer, "is_fast", False):
            raise ModelError(
                f"{directory} has no fast tokenizer (tokenizer.json or tekken.json); only those are supported"
            )
        return cls(cast("PreTrainedTokenizerFast", tokenizer))

    def encode(self, text: str, add_special_tokens: bool = True, room: Room | None = None) -> list[int]:
        """Token ids of ``text``; add_special_tokens: with those that the tokenizer adds (often a begin token).

        Raises :class:`~foresay.spec.errors.ContextLengthExceeded` for a text that exceeds ``room``.
        """
        encoding = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        if room is not None:
            room.check(len(encoding))
        ids: list[int] = encoding.ids
        return ids

    def as_text(self, text: str) -> RenderedPrompt:
        """A prompt in which the names of control tokens are text."""
        return RenderedPrompt(*self._control.sealed(text, ""))

    def encode_after(
        self, spoken: Sequence[int], prompt: RenderedPrompt, add_special_tokens: bool = True, room: Room | None = None
    ) -> list[int]:
        """Token ids of ``prompt`` that begin with ``spoken``, if the text begins with theirs; else as usual.

        A model may generate other tokens than the tokenizer would for the same text. Tokens that it has read or
        generated are reused unchanged, so that their KV is reused.
        """
        begun = self.decode(spoken, skip_special_tokens=False) if spoken else ""
        if begun and prompt.marked.startswith(begun):
            ids = [*spoken, *self._encode(prompt.behind(begun), False, room)]
            if self.decode(ids, skip_special_tokens=False) == prompt.text:
                return ids
        return self._encode(prompt, add_special_tokens, room)

    def _encode(self, prompt: RenderedPrompt, add_special_tokens: bool, room: Room | None) -> list[int]:
        if not prompt.mark:
            return self.encode(prompt.marked, add_special_tokens, room)
        return self._control.encode(prompt, add_special_tokens, room)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ``ids``; broken characters become U+FFFD."""
        (text,) = self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return str(text)

    def spelled(self, token: int) -> SpelledToken:
        """A single token, even half a character; empty for a placeholder."""
        return self._spelling.of(token)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token."""
        return self._spelling.of(token).raw

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary spells it; "" for placeholders of the model's embedding."""
        return [self._backend.id_to_token(token) or "" for token in ids]

    @property
    def templates(self) -> str:
        """All of the checkpoint's chat templates, concatenated."""
        template = self._templates.chat_template
        return "\n".join(map(str, template.values())) if isinstance(template, dict) else str(template or "")

    def special_id(self, token: str) -> int | None:
        """The id of a special token by its text; None if there is none."""
        id: int | None = self._backend.token_to_id(token)
        return id if id in self.special_ids else None

    def added_id(self, token: str) -> int | None:
        """The id of an added token by its text, special or not; None if there is none."""
        return self._added.get(token)

    @property
    def infilling(self) -> list[int] | None:
        """The ids of the tokens before a prefix, before a suffix, and before the text between them; None if it has
        none."""
        known = (names for names in _INFILL if self._added.keys() >= {*names})
        return next(([self._added[name] for name in names] for names in known), None)

    @property
    def config(self) -> dict[str, Any]:
        """Its class, and its special tokens by name, as the vocabulary spells them."""
        named = {name: str(token) for name, token in self._templates.special_tokens_map.items() if token}
        return {"tokenizer_class": type(self._templates).__name__} | named

    @property
    def has_template(self) -> bool:
        """Whether chat messages can be rendered."""
        return self._templates.chat_template is not None

    @property
    def template(self) -> str:
        """The chat template, the default one if there are several; empty if there is none."""
        template = self._templates.chat_template
        return template if isinstance(template, str) else str((template or {}).get("default", ""))

    @cached_property
    def hoists_system(self) -> bool:
        """Whether the chat template moves system messages to the beginning of the conversation."""
        roles = {"user": "first", "assistant": "second", "system": "third"}
        said = [{"role": role, "content": f"what is said {place}"} for role, place in roles.items()]
        with suppress(InvalidRequest):
            text = self.render([*said, said[0]]).text
            return text.find("what is said third") < text.find("what is said first")
        return False

    def render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[dict[str, Any]] = (),
    ) -> RenderedPrompt:
        """The prompt that the template makes of ``messages``. Raises :class:`InvalidRequest` if it refuses them."""
        if not self.has_template:
            raise InvalidRequest("messages", "this model has no chat template; use /v1/completions")
        # Clients may set a template's own variables; chat_template, tools and the like are not passed on unchecked.
        for name in sorted(set(template_kwargs or ()) & set(signature(self._templates.apply_chat_template).parameters)):
            raise InvalidRequest("chat_template_kwargs", f" must not hold {name}")
        given = (messages, list(tools) or None, dict(template_kwargs or {}))
        (told, offered, variables), mark = self._control.sealed(given, self.templates)
        others = {name: offered for name in TOOLS_VARIABLES[1:] if offered and name in self.templates}
        try:
            prompt = self._templates.apply_chat_template(
                told,
                tools=offered,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **others | variables,
            )
        except Exception as error:  # a template is a program: it may raise anything
            reason = str(error).replace(mark, "") if mark else error
            raise InvalidRequest("messages", f"the model's chat template refuses these messages: {reason}") from error
        return RenderedPrompt(str(prompt), mark)


# -- the bytes of single tokens ----------------------------------------------------------------------------------------
# ``decode([id])`` does not give them: half a character becomes U+FFFD, and a space may be stripped.

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


class SpelledToken(NamedTuple):
    r"""raw: the token's bytes. text: with incomplete characters as ``\xf0`` escapes. whole: whether there are none.
    numbers: the bytes for JSON; shared, so not to be modified.
    """

    raw: bytes
    text: str
    whole: bool
    numbers: list[int]

    @classmethod
    def of(cls, spelled: bytes) -> SpelledToken:
        """Make it from the bytes."""
        try:
            text, whole = spelled.decode(), True
        except UnicodeDecodeError:
            text, whole = spelled.decode(errors="backslashreplace"), False
        return cls(spelled, text, whole, list(spelled))


class Spelling:
    """The bytes of every token of a tokenizer (its Rust part). Safe to use from several threads."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._literal = {id: entry.content for id, entry in backend.get_added_tokens_decoder().items()}
        self._decoders = _decoders(json.loads(backend.decoder.__getstate__())) if backend.decoder else frozenset()
        self._known: dict[int, SpelledToken] = {}

    def of(self, token: int) -> SpelledToken:
        """The token's bytes; empty if it has no text (a placeholder id)."""
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = SpelledToken.of(self.raw(token))
        return known

    def is_stray(self, token: int) -> bool:
        """Whether it is a byte-fallback token, which stands for a single byte (sentencepiece)."""
        return "ByteFallback" in self._decoders and bool(_BYTE_TOKEN.fullmatch(self._backend.id_to_token(token) or ""))

    def raw(self, token: int) -> bytes:
        """Its bytes, without caching."""
        if token in self._literal:
            return str(self._literal[token]).encode()
        piece = self._backend.id_to_token(token)
        if piece is None:
            return b""
        if "ByteLevel" in self._decoders:
            return _of_byte_level(piece)
        byte = _BYTE_TOKEN.fullmatch(piece)
        if byte and "ByteFallback" in self._decoders:
            return bytes([int(byte[1], 16)])
        if self._decoders & {"Metaspace", "Replace"}:
            return str(piece).replace(_SPACE, " ").encode()
        return str(self._backend.decode([token], skip_special_tokens=False)).encode()


def _decoders(state: dict[str, Any]) -> frozenset[str]:
    """The types of a decoder and of its parts."""
    return frozenset({state["type"]}).union(*(_decoders(one) for one in state.get("decoders", ())))


def _of_byte_level(piece: str) -> bytes:
    """Bytes from GPT-2's alphabet, in which every byte is a printable character; other text is encoded as UTF-8."""
    alphabet = _byte_level_alphabet()
    if all(character in alphabet for character in piece):
        return bytes(alphabet[character] for character in piece)
    return piece.encode()


@lru_cache(maxsize=1)
def _byte_level_alphabet() -> dict[str, int]:
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
