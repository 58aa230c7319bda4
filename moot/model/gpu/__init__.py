"""The accelerator's way through a step: paged KV, one upload per step, recorded graphs."""
