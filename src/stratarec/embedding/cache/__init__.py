"""Rows pass through slots of level 0 and go home when their slot is needed: a directory says which, a mover does it."""
