"""Ollama's API: its requests become chat requests or completions, and the answers its lines of JSON."""
