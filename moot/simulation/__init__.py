"""Discrete-event simulation of routers, drafters and verifiers, driven by the policies of moot.core."""
