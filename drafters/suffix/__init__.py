"""The suffix drafter: proposes what followed an earlier occurrence of the text's longest suffix, here or in an
answer."""
