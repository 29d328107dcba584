"""Attacks that measure what a site's uploads reveal about it."""
