"""Parts of `lab.bench.gpu_check`."""
