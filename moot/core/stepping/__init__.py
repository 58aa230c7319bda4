"""What goes into a step of a verifier: the drafts that it holds, and the part of each that is worth a slower step."""
