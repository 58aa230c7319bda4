"""Keys and values of the tokens that a model has read."""
