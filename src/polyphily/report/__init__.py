"""Reports: the HTML page of one or several runs, and figures for papers."""
