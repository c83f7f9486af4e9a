"""Observing speculation: metrics, and self-checks against plain decoding."""
