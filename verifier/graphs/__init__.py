"""Whole steps as functions of static tensors, so that a GPU replays them from one captured graph."""
