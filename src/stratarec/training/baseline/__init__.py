"""What other methods make of the same prepared splits."""
