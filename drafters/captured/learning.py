"""What the calibration learns of a step that was captured: whether each level of a chain was hit.

Chances of other trees stay on the device, so nothing is learnt of those.
"""

from __future__ import annotations

import numpy as np

from drafters.calibration import Calibration, kind_of
from spec.sequence import Sequence
from spec.tree import DraftTree

_UNKNOWN = np.array([np.nan])


def learn(calibration: Calibration, sequence: Sequence, tree: DraftTree, path: list[int]) -> None:
    """path: nodes of the tree that were committed, their draws already in the sequence's tokens."""
    if not tree.is_chain:
        return
    drawn = sequence.tokens[len(sequence.tokens) - len(path) :]
    kind, drafted = kind_of(sequence.sampling), tree.tokens.tolist()[1:]
    for depth, (token, draft) in enumerate(zip(drawn, drafted, strict=False)):
        calibration.saw(kind, depth, _UNKNOWN, np.array([draft == token]))
    calibration.step()
