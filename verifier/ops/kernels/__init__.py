"""Triton bodies of the ops, one idea per file; each launcher has the contract of the op of the same name."""
