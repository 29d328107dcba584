"""Polyphily's methods as a Flower app; the code itself is in the package polyphily."""
