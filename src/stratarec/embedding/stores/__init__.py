"""Where rows rest."""
