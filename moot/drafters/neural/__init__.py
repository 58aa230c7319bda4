"""Drafters with a draft model of their own, alone or in stages."""
