"""The pods at the other end: links to drafters and verifiers, drafters in the router itself, discovery."""
