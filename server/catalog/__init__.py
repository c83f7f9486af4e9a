"""Known public models: drafts for them (``catalog.toml``), and how they write tool calls (``formats.py``)."""
