"""``foresay check``: whether a target and its drafters work together, and how to fix it if not."""
