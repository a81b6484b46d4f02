"""Directory of a run, its phases and periods, and the model that a run ends with."""
