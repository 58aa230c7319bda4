"""Discrete-event simulation of routers, drafter pools and verifiers, driven by the policies of moot/core."""
