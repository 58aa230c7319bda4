"""The drafter that decodes several sequences in one superposed pass."""
