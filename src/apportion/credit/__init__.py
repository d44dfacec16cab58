"""Credit methods: one file each, one line in `registry`."""
