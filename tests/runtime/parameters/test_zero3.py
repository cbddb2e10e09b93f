"""A stage in shards trains as one process does; the stories are in `zero3_stories`."""

from tests.support.zero_told import Stories


class TestStories(Stories):
    file = "fully_sharded"
    later = (3,)
