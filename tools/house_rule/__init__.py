"""The house rule: what it reads of a checkout, what it asks, and what is excepted by name."""
