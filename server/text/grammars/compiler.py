"""From a grammar's text to a constraint, for one model's tokenizer, in parallel to the steps."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer as Backend

from foresay.server.text.grammars import constraint as constraint
from foresay.server.text.tokenizer import tokenizer_json
from foresay.spec.errors import InvalidRequest
from foresay.spec.request import Grammar, Request

#: Most compiled grammars in the cache, with the automata that grow while they are used.
MOST_KEPT = 32
#: One automaton state takes 1 to 2 kB. Other limits are llguidance's own: about 20 ms to compile, 15 ms for a mask.
MOST_STATES = 50_000
#: llguidance follows references between rules by recursion. The longest chain that a grammar's text can hold would need
#: more than a thread's usual 8 MB, and a stack overflow ends the process.
STACK_BYTES = 256 << 20
_STACKS = threading.Lock()


class GrammarCompiler:
    """Makes constraints. Thread-safe; compiling releases the interpreter's lock.

    tokenizer: the text of a ``tokenizer.json``. vocab_size: the model's, which may be larger.
    """

    def __init__(
        self, tokenizer: str, vocab_size: int, eos_token_ids: Sequence[int], most_states: int = MOST_STATES
    ) -> None:
        backend = Backend.from_str(tokenizer)
        known = sorted(backend.get_vocab(with_added_tokens=True).values())
        added = {token.content: id for id, token in backend.get_added_tokens_decoder().items()}
        size = max(vocab_size, known[-1] + 1)
        ends = [token for token in eos_token_ids if token < vocab_size]
        self._tokenizer = LLTokenizer(tokenizer, n_vocab=size, eos_token=ends)
        self._special = [name for name, token in added.items() if self._tokenizer.is_special_token(token)]
        self._vocabulary = constraint.Vocabulary.of(vocab_size, known, ends, size)
        self._limits = LLParserLimits(max_lexer_states=most_states, verbose_errors=False)
        self._kept: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()  # by salt and text
        self._lock = threading.Lock()

    @classmethod
    def load(cls, directory: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> GrammarCompiler | None:
        """The compiler for the checkpoint in ``directory``; None if it has no readable tokenizer."""
        text = tokenizer_text(directory)
        return None if text is None else cls(text, vocab_size, eos_token_ids)

    def compile(self, grammar: Grammar, salt: str = "") -> constraint.LlguidanceConstraint:
        """The constraint that enforces ``grammar``. Raises :class:`InvalidRequest` naming its field, with the reason.

        salt: compiled grammars are shared only between equal salts, since the time saved would reveal earlier use.
        """
        matcher = self.kept(grammar, salt)
        if matcher is None:
            matcher = self._fresh(grammar.text)
            self._check(matcher, grammar)
            matcher = self._keep((salt, grammar.text), matcher)
        renewed = partial(self._renewed, grammar.text, salt)
        return constraint.LlguidanceConstraint(matcher, self._vocabulary, grammar, renewed)

    def kept(self, grammar: Grammar, salt: str = "") -> LLMatcher | None:
        """A matcher at the start of a cached grammar; None if it is not cached."""
        with self._lock:
            matcher = self._kept.get((salt, grammar.text))
            if matcher is None:
                return None
            self._kept.move_to_end((salt, grammar.text))
            return matcher.deep_copy()

    def _keep(self, key: tuple[str, str], matcher: LLMatcher) -> LLMatcher:
        with self._lock:
            self._kept[key] = matcher
            while len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
            return matcher.deep_copy()

    def _renewed(self, text: str, salt: str) -> LLMatcher:
        """A new matcher: the cached one's automaton is full."""
        with self._lock:
            self._kept.pop((salt, text), None)
        return self._fresh(text)

    def _fresh(self, text: str) -> LLMatcher:
        text = unforced(text) if spells(text, self._special) else text
        return _deeply(lambda: LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits))

    def _check(self, matcher: LLMatcher, grammar: Grammar) -> None:
        """Raise unless the grammar compiled and allows a first token."""
        if matcher.is_error():
            raise InvalidRequest(grammar.param, f" cannot be compiled: {constraint.complaint(matcher)}")
        row = np.zeros(self._vocabulary.columns, dtype=np.int32)
        try:
            constraint.GrammarMatcher(matcher.deep_copy(), self._vocabulary, grammar, "inside").fill(row)
        except constraint.Stuck as error:
            raise InvalidRequest(grammar.param, f" cannot begin: {error}") from None
        if not (row & ~self._vocabulary.ends).any():
            raise InvalidRequest(grammar.param, " matches no text")


def _deeply(make: Callable[[], LLMatcher]) -> LLMatcher:
    """Call ``make`` in a thread with a large stack."""
    made: list[LLMatcher] = []
    thread = threading.Thread(target=lambda: made.append(make()), name="grammar")
    with _STACKS:
        usual = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join()
    if not made:
        raise constraint.GrammarFailed("llguidance gave up on the grammar")
    return made[0]


def tokenizer_text(directory: Path) -> str | None:
    """The text of ``tokenizer.json``, plus tokens that only ``tokenizer_config.json`` adds, minus padding and
    truncation.

    For a checkpoint that has only ``tekken.json``, converted from that.
    """
    text = tokenizer_json(directory)
    if text is None:
        return None
    tokenizer: dict[str, Any] = msgspec.json.decode(text)
    tokenizer["padding"] = tokenizer["truncation"] = None
    config = directory / "tokenizer_config.json"
    added = msgspec.json.decode(config.read_bytes()).get("added_tokens_decoder") if config.exists() else None
    have = {token["id"] for token in tokenizer.setdefault("added_tokens", [])}
    missing = sorted((int(id), token) for id, token in (added or {}).items() if int(id) not in have)
    tokenizer["added_tokens"] += [{"id": id, **token} for id, token in missing]
    return msgspec.json.encode(tokenizer).decode()


# -- grammars that spell a special token -------------------------------------------------------------------------------
# Where a grammar allows only one text, llguidance forces the tokens that the tokenizer makes of it; but a tokenizer
# turns the name of a special token into that token, which is not text. Such grammars are compiled without forcing.


_ESCAPE = re.compile(r"\\+x\{([0-9a-f]{1,6})\}")
_OFF = '%llguidance {"no_forcing": true}\n'


def spells(grammar: str, names: Iterable[str]) -> bool:
    """Whether the text of ``grammar`` holds one of ``names``."""
    plain = _ESCAPE.sub(lambda found: chr(int(found[1], 16)), grammar)
    return any(name in plain for name in names)


def unforced(grammar: str) -> str:
    """The same grammar without forced tokens."""
    if not grammar.startswith("{"):
        return _OFF + grammar
    whole = json.loads(grammar)
    first = whole["grammars"][0]
    lark, schema = first.get("lark_grammar"), first.get("json_schema")
    first["lark_grammar"] = _OFF + (f"start: %json {json.dumps(schema)}" if lark is None else lark)
    first["json_schema"] = None
    return json.dumps(whole)


log = logging.getLogger("foresay.engine")

Compiled = tuple[Request, constraint.LlguidanceConstraint | InvalidRequest]


class Pending:
    """Requests whose grammars are being compiled, in order of arrival.

    load: makes the compiler, None if this model has none; called at once, in another thread. wake: called, in another
    thread, whenever a request is ready.
    """

    def __init__(self, load: Callable[[], GrammarCompiler | None], wake: Callable[[], None]) -> None:
        self._wake = wake
        self._waiting: deque[tuple[Request, Future[constraint.LlguidanceConstraint]]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._compiler = self._thread.submit(load)

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self, request: Request) -> None:
        """Compile the grammar of ``request``."""
        assert request.grammar is not None, "only requests with a grammar wait for one"
        compiled = self._thread.submit(self._compile, request.grammar, request.salt)
        self._waiting.append((request, compiled))
        compiled.add_done_callback(lambda _: self._wake())

    def cancel(self, id: str) -> bool:
        """Remove a request; whether it was pending."""
        for index, (request, compiled) in enumerate(self._waiting):
            if request.id == id:
                compiled.cancel()
                del self._waiting[index]
                return True
        return False

    def ready(self) -> Iterator[Compiled]:
        """The next requests in order that are ready, each with its constraint or the error."""
        while self._waiting and self._waiting[0][1].done():
            request, compiled = self._waiting.popleft()
            yield request, _outcome(request, compiled)

    def _compile(self, grammar: Grammar, salt: str) -> constraint.LlguidanceConstraint:
        if (compiler := self._compiler.result()) is None:
            raise InvalidRequest(grammar.param, ": this model has no tokenizer.json that llguidance can read")
        return compiler.compile(grammar, salt)


def _outcome(
    request: Request, compiled: Future[constraint.LlguidanceConstraint]
) -> constraint.LlguidanceConstraint | InvalidRequest:
    error = compiled.exception()
    if error is None:
        return compiled.result()
    if isinstance(error, InvalidRequest):
        return error
    log.error("a grammar could not be compiled", exc_info=error)
    param = request.grammar.param if request.grammar is not None else "grammar"
    return InvalidRequest(param, f" cannot be compiled: {type(error).__name__}")
