"""What callers ask and get: requests, choices, text, admission, authentication."""
