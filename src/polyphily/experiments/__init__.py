"""Experiments of several runs: comparisons of methods, and sweeps over values."""
