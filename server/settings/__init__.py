"""The settings, and how they are resolved. Does not import torch."""
