"""`stratarec doctor`: what of a machine slows or stops runs, and whether its GPU computes as its CPU does."""
