"""The subcommands of `moot`, one module each, and what they share."""
