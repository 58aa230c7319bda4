"""Measurements of the router alone, before scripted or traced peers."""
