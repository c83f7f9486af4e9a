"""Drafters as parts of a captured step: they propose on the device, with shapes that never change."""
