"""One folder a question; each prints one JSON object per line on stdout and talks on stderr."""
