"""Ollama's API: its requests become chat requests or completions, and answers become its lines of JSON."""
