"""Public models that are known: ``catalog.toml`` says what drafts for each, and where it is to be had."""
