"""Directory of a run, its periods, and the model that a run ends with."""
