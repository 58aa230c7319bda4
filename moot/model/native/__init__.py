"""The parts of a decoder's pass between its products as compiled kernels, where CPU and compiler allow it."""
