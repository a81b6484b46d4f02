"""Which feature in which tower."""
