"""Anthropic's Messages API: its requests become chat requests, and the answers its content blocks."""
