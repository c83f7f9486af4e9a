"""Training heads: the target writes texts, a head learns from them, the result is a published layout."""
