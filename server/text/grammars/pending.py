"""Compiling beside the steps: requests wait here until their grammars are ready, and nobody waits for them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from server.text.grammars.compiler import GrammarCompiler
from server.text.grammars.constraint import LlguidanceConstraint
from spec.errors import InvalidRequest
from spec.request import Grammar, Request

log = logging.getLogger("foresay.engine")

Compiled = tuple[Request, LlguidanceConstraint | InvalidRequest]


class Pending:
    """Requests whose grammars are being compiled, in the order in which they came.

    compiler: None if this model has none. wake: called, in another thread, whenever one is ready.
    """

    def __init__(self, compiler: GrammarCompiler | None, wake: Callable[[], None]) -> None:
        self._compiler = compiler
        self._wake = wake
        self._waiting: deque[tuple[Request, Future[LlguidanceConstraint]]] = deque()
        self._thread: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self, request: Request) -> None:
        """Compile the grammar of ``request``."""
        assert request.grammar is not None, "only requests with a grammar wait for one"
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        compiled = self._thread.submit(self._compile, request.grammar, request.salt)
        self._waiting.append((request, compiled))
        compiled.add_done_callback(lambda _: self._wake())

    def cancel(self, id: str) -> bool:
        """Forget a request; whether it was here."""
        for index, (request, compiled) in enumerate(self._waiting):
            if request.id == id:
                compiled.cancel()
                del self._waiting[index]
                return True
        return False

    def ready(self) -> Iterator[Compiled]:
        """The requests whose turn it is, each with its constraint or with what is wrong."""
        while self._waiting and self._waiting[0][1].done():
            request, compiled = self._waiting.popleft()
            yield request, _outcome(request, compiled)

    def _compile(self, grammar: Grammar, salt: str) -> LlguidanceConstraint:
        if self._compiler is None:
            raise InvalidRequest(
                grammar.param, f"{grammar.param}: this model has no tokenizer.json that llguidance can read"
            )
        return self._compiler.compile(grammar, salt)


def _outcome(request: Request, compiled: Future[LlguidanceConstraint]) -> LlguidanceConstraint | InvalidRequest:
    error = compiled.exception()
    if error is None:
        return compiled.result()
    if isinstance(error, InvalidRequest):
        return error
    log.error("a grammar could not be compiled", exc_info=error)
    param = request.grammar.param if request.grammar is not None else "grammar"
    return InvalidRequest(param, f"{param} cannot be compiled: {type(error).__name__}")
