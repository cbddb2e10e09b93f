"""A schedule in a file of its own, as users' projects have it: it counts the calls."""

STEP = 0


def next_step():
    """The number of this call."""
    global STEP
    STEP += 1
    return STEP


class Progress:
    """Counts in its class."""

    steps = 0

    def tick(self):
        """The number of this call."""
        Progress.steps += 1
        return Progress.steps


PROGRESS = Progress()
