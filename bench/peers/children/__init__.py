"""The program of each peer, run by the interpreter of its environment. Imports nothing of this repository but this."""
