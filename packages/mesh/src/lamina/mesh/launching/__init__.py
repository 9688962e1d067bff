"""How this process was started: its variables, its launcher, its machine, the meeting of ranks."""
