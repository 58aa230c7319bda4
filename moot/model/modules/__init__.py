"""The pass through a transformers model whose attention and layers are replaced by batch-invariant ones."""
