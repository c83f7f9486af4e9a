"""The trace: every step of the engine in a file (``--trace FILE``), to be looked into and evaluated again later."""
