"""The drafter: one kind of drafter behind gRPC."""
