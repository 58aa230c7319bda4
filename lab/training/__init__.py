"""Training drafters: the target writes texts, its hidden states are kept, and small drafters learn from both."""
