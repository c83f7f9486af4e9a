"""Public models that are known to fit each other: ``catalog.toml`` says which, nothing else does."""
