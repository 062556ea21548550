"""Products with weights in 8 and 4 bits."""
