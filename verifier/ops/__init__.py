"""Ops: public functions with their contracts; their bodies are the torch references. Ops import their kernels, and both
import :mod:`foresay.verifier.ops.records`."""
