"""A run that goes on after it has ended: `continue`, `forget`, `rebase`, `revert`."""
