"""A checkpoint on disk, or on the Hugging Face hub, read into fused tensors, and the decoder that runs them."""
