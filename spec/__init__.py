"""The heart: draft trees, the accept rule, sampling with position-keyed noise, and the speculative step loop.

Imports torch, numpy, msgspec and ``kvpaging`` only. It declares the :class:`~spec.protocols.Drafter` and
:class:`~spec.protocols.Verifier` that the rooms above implement.
"""
