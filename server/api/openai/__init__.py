"""OpenAI's chat and completions, and vLLM's tokenizer routes."""
