"""The algorithms: pure Python on plain data, without tensor, server, clock or event loop."""
