"""Training, evaluation, checkpoints, prediction and export."""
