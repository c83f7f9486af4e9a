"""Replay: what other trees, budgets and lookup drafters would have had accepted in a recorded trace, and cost."""
