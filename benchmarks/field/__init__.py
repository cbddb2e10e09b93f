"""Plans for clusters that people have: sites far apart, unequal GPUs, odd numbers of GPUs."""
