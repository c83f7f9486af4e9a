from __future__ import annotations

from tests.same_tokens.conftest import pair as pair
