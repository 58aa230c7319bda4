"""Measurements in virtual time, where costs are scripted and exact."""
