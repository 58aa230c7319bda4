"""The router: takes requests, asks drafters, lets them vote, has the target verify, streams the text."""
