"""The :mod:`~foresay.server.engine.drafters.registry` of drafters: an entry for each kind that ``--draft`` can name."""
