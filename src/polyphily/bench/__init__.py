"""Timings of a round (`polyphily bench`): against the sequential engine, against a plain
torch_geometric loop, and against the machine's roofline."""
