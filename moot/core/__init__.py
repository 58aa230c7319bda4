"""The algorithms: pure Python on plain data. No tensor, no server, no clock, no event loop."""
