"""The accelerator's way through a step: paged KV, one upload a step, recorded graphs."""
