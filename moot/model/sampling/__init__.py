"""From logits to token ids: the tensor form of the one sampler."""
