"""What installations deliver that no machine here has, and how far the simulation that says so is right."""
