"""A trained model for use: an export's manifest and files, and the scorer that reads nothing else."""
