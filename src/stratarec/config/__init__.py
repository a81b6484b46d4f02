"""What all sections of a recipe share: validation, units, YAML."""
