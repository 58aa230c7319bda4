"""The three programs: router, verifier, drafter."""
