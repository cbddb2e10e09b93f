"""How long planning takes and how much memory, from the start of the process to the plan file."""
