"""Settings of a text that a tiny model writes in a second."""

from moot.training.text import TextSettings

SETTINGS = TextSettings(seed=3, rows=6, row_positions=96, long_rows=3, long_positions=160, long_every=3)
