"""What can be learned about a site from what it shares."""
