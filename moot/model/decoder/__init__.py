"""A lean forward pass for decoders whose layers are known: plain torch calls on weights in a layout of their own."""
