"""How clients' graphs differ: pure functions of host graphs."""
