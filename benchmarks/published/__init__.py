"""autopipe's cost model beside published training runs: how far off is it? See README.md."""
