"""The drafters: implementations of :class:`foresay.spec.protocols.Drafter`."""
