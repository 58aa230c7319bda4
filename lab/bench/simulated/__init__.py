"""What lab/bench/simulate.py measures on this machine before it predicts."""
