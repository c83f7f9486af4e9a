"""Training heads: the target generates texts, a head is trained on them, and the result has a published layout."""
