"""The program of each peer, run by its environment's interpreter, which imports nothing else of this repository."""
