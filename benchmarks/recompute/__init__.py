"""What recomputation costs by op and by block, in the tool's own plans."""
