"""Measurements of the model's forward pass."""
