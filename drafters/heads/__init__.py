"""Heads while they learn: plain torch modules, dense attention over whole texts, tensors by their published names."""
