"""Products with one of several matrices for each row."""
