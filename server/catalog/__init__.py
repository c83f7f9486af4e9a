"""What is known of public models: what drafts for them (``catalog.toml``), how they write calls (``formats.py``)."""
