"""Target and draft models: one ragged forward pass and what it needs, without any knowledge of the wire."""
