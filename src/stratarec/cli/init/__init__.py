"""A first recipe: for a log that is looked at, or a shipped one."""
