"""Plans run on this machine's GPU: what they foretold, and whether every layout trains alike."""
