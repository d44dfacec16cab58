"""Records of other trainers as the rows of a run folder: TRL, verl, prime-rl, and our own interchange file."""
