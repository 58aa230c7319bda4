"""Drafters that draft from what the request brings: a predicted output, the other choices of the same request."""
