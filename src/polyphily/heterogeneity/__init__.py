"""Measures of how the graphs of clients differ, as pure functions of host graphs."""
