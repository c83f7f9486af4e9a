"""Heads: small networks that read a target's hidden state, loaded from the layouts they are published in."""
