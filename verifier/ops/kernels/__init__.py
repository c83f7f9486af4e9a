"""Kernels in Triton's language: for GPUs, and those in rows, rotate and trees also for CPUs."""
