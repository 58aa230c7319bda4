"""From a folder of weights to a model in memory."""
