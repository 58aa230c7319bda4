"""What every process needs around its work: metrics, logs, traces, admin port, faults, child processes."""
