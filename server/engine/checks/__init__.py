"""Looks at a target and at files before they are loaded, for the engine and for ``foresay check``."""
