"""Tables of one width that share kernel calls."""
