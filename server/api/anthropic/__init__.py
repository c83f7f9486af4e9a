"""Anthropic's Messages API: its requests become chat requests, and answers become its content blocks."""
