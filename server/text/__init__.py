"""Text on its way to token ids and back: tokenizer, messages, tools, grammars, and how output is read."""
