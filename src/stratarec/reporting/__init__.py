"""Output for people: progress, tables on the terminal, HTML pages, and curves."""
