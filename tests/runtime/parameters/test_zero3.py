"""A stage in shards trains as one process does; the stories are in `zero_worker`."""

from tests.support.zero_told import Stories


class TestStories(Stories):
    file = "fully_sharded"
