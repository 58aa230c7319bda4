"""What measurements of the running system share: prompts, many requests at once over HTTP, processes watched."""
