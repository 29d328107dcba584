"""What runs look like: the page of one or several runs, and figures for papers."""
