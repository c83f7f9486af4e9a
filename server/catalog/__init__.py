"""What is known of public models: what drafts for each (``catalog.toml``), and how they write tool calls (``formats.py``)."""
