"""How bytes travel: gloo messages, memory of ranks on the same host, torch's own calls."""
