"""Speculation: draft trees, the accept rule, sampling with position-keyed noise, and the speculative step loop.

Imports torch, numpy, msgspec and ``kvpaging`` only. It declares the :class:`~foresay.spec.protocols.Drafter` and
:class:`~foresay.spec.protocols.Verifier` that the layers above implement.
"""
