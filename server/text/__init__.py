"""From text to token ids and back: tokenizer, messages, tools, grammars, and output parsers."""
