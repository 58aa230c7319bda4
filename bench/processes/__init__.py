"""Processes that stand beside the measured ones: scripted peers, and a verifier that keeps a trace."""
