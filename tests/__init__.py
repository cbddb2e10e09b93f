"""The tests, and what every process of theirs stands on.

Hundreds of processes are started, each of which imports torch and ends soon after. Python's search
for reference cycles would take a third of their time: while modules are loaded it finds nothing,
and at the end of a process it looks through all of them once more.
"""

import atexit
import gc

gc.set_threshold(50_000, 20, 20)
atexit.register(gc.freeze)
