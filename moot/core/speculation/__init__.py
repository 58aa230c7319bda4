"""How long a draft is and which drafters are asked for it, for one request and for all."""
