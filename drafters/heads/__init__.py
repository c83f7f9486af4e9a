"""Heads in training: plain torch modules, dense attention over whole texts, tensors under their published names."""
