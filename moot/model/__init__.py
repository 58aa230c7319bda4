"""Target and draft models: loading, KV cache, one ragged forward pass, the tensor sampler. Knows no wire."""
