"""The subcommands of `moot`, one module each: `run(argv)` returns the exit status."""
