"""How fast a round is (`polyphily bench`): against one client after the other, against a plain
torch_geometric loop, and against what the machine could do."""
