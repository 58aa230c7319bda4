"""What drives one request: drafters asked, votes, verification, commits."""
