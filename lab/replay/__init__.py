"""Acceptance without noise: what the target says and what drafters propose is recorded once, and replayed."""
