from __future__ import annotations

import gc

import pytest

from tests.same_tokens.conftest import pair as pair


@pytest.fixture(scope="module", autouse=True)
def frozen(process_as_it_was: None) -> None:
    """Each part of a step that is captured has its garbage collected, without a look through all that the tests of a
    worker have left before."""
    gc.collect()
    gc.freeze()
