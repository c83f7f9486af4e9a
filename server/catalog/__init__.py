"""What is known of public models: what drafts for each (``catalog.toml``), how they write tool calls (``formats.py``)."""
