"""What is seen while work lasts: progress for people and machines, curves as they grow."""
