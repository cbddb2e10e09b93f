"""Plans run on this machine's GPU: bytes, seconds, and whether every layout trains alike."""
