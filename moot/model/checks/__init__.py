"""What a start proves about the numbers of this machine before anything is served."""
