"""A run directory's records -> one self-contained HTML page."""
