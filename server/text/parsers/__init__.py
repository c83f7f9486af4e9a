"""Parsers of models' output: tool calls and reasoning."""
