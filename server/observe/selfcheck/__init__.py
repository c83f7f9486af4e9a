"""Self-checks: generated texts are decoded again, without drafts or cached KV, and compared token by token."""
