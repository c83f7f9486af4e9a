"""The registry of drafters: one entry for each kind that ``--draft`` can name (:mod:`server.drafters.registry`)."""
