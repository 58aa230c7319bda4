"""Drafter kinds that are in no default, installed by the entry points that anybody uses."""
