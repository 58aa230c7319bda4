"""From many proposals to one draft: the draft trie, the vote, the weights of drafters and their calibration."""
