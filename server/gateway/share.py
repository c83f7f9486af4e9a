"""What there is only so much of, shared by key: no key holds more of it than stays free.

So whoever comes next finds something: of two keys that want everything the first gets half and the second a quarter,
and both a third as soon as the first gives some back. The only key there is, or a server without keys, may use all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from server.gateway.caller import CALLER, Caller
from server.schemas.errors import ApiError


class Shared:
    """So many places, bytes or the like. most: of all callers together."""

    def __init__(self, most: int) -> None:
        self.most, self.used = most, 0
        self._held: Counter[str] = Counter()

    @property
    def own(self) -> int:
        """What the caller holds."""
        return self._held[CALLER.get().tenant]

    def fits(self, amount: int, caller: Caller) -> bool:
        """Whether a caller may hold so much more. One that holds nothing gets whatever is free."""
        own, free = self._held[caller.tenant], self.most - self.used - amount
        fair = caller.rate_limiter.alone or not own or own + amount <= free
        return not amount or (free >= 0 and fair)

    def take(self, amount: int, refusal: Callable[[], ApiError]) -> None:
        """Let the caller of this context hold so much more, or raise."""
        if not self.fits(amount, CALLER.get()):
            raise refusal()
        self.change(CALLER.get().tenant, amount)

    def give(self, amount: int) -> None:
        """The caller holds so much less."""
        self.change(CALLER.get().tenant, -amount)

    @contextmanager
    def holding(self, amount: int, refusal: Callable[[], ApiError]) -> Iterator[None]:
        """Hold so much for a while."""
        self.take(amount, refusal)
        tenant = CALLER.get().tenant
        try:
            yield
        finally:
            self.change(tenant, -amount)

    def change(self, tenant: str, amount: int) -> None:
        """A caller holds so much more, or less."""
        self.used += amount
        self._held[tenant] += amount
        assert self._held[tenant] >= 0, "nobody gives what it does not hold"
        if not self._held[tenant]:
            del self._held[tenant]
