"""Memory and seconds of checkpoints: see README.md."""
