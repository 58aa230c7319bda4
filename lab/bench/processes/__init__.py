"""Processes that stand beside the measured router: scripted peers, and drafters with a scripted kind."""
