"""A stage in shards trains as one process does; the stories are in `zero_worker`."""

from tests.zero_told import Stories


class TestStories(Stories):
    file = "fully_sharded"
