"""Other systems measured side by side with this one: each in its own environment, asked the same token ids in turns."""
