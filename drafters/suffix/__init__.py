"""The suffix drafter: what followed the longest context that ends the text and stood before, here or in an answer."""
