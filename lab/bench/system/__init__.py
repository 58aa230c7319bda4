"""Measurements of the whole system as processes, asked through HTTP."""
