"""Bodies in Triton's language: a GPU's kernels, and in rows, rotate and trees a CPU's too."""
