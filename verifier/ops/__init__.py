"""Ops: public functions with their contracts, whose bodies are the torch references. Ops import their kernels, and both
import :mod:`foresay.verifier.ops.records`."""
