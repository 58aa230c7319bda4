"""Drafters that look continuations up in texts and tables."""
