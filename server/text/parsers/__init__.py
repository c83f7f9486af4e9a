"""How the text of models is read: tool calls and reasoning, one module per way of writing them."""
