"""Parts of `bench.gpu_check`."""
