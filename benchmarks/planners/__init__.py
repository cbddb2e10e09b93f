"""Plans of other planners' published problems, ours beside theirs."""
