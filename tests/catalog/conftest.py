from __future__ import annotations

from tests.checking.conftest import models as models
from tests.verifier.faked_hub import cache as cache
from tests.verifier.faked_hub import hub as hub
