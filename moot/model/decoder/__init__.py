"""The lean pass for decoders whose layers are known, in plain torch or in compiled kernels."""
