"""`stratarec tune`: many trainings of one recipe, and the best of its values by validation."""
