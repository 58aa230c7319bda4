"""Measurements on recordings of `moot replay record`: exact, without the target and without a clock."""
