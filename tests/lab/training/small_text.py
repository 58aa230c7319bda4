"""Settings of a text that a tiny model writes in a second."""

from lab.training.text_making import TextSettings

SETTINGS = TextSettings(seed=3, rows=20, row_positions=96, long_rows=5, long_positions=160, long_every=3)
