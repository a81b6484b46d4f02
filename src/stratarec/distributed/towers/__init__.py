"""The exchange by towers (SPTT)."""
