"""Aggregated speculative decoding: what the three services share."""
