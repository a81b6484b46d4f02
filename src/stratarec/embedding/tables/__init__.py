"""Table groups, the directory of their cache, and the movement of rows."""
