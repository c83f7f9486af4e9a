"""Whoever proposes: each module one drafter, an implementation of :class:`spec.protocols.Drafter`."""
