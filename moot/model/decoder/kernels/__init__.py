"""The compiled C kernels of the lean pass, where processor and compiler allow them."""
