"""Whoever proposes: each module one drafter, an implementation of :class:`foresay.spec.protocols.Drafter`."""
