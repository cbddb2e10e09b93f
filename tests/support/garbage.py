"""Python's collector of cycles, at a pace that fits tests: graphs make many objects, few cycles."""

import gc


def rarely() -> None:
    """Look for cycles seldom, and among none of the objects there are now.

    A trace leaves hundreds of thousands of objects: at Python's own pace, looking through all of
    them again and again takes a tenth of the time of all tests. What is there now, modules and
    tests, stays until the process ends.
    """
    gc.set_threshold(1_000_000, 1000, 1000)
    gc.freeze()
