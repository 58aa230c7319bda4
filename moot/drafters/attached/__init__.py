"""Drafters that run in the target's process and use its hidden states or layers."""
