"""Is autopipe's runtime faster than torch's? `python -m benchmarks.pipeline` measures it."""
