"""The verifier: the target model, its cache, its batches, its sampler."""
