"""The command line: `autopipe init | trace | costs | plan | explain | simulate | run | ...`.

In: the user's arguments and files. Out: data on stdout, messages on stderr, an exit code: 0, 2 for
an error that the user can fix, 1 for any other. Commands pass files to each other:

    autopipe init model.py
    autopipe plan model.py -o plan.json     ->  autopipe explain plan.json
                                            ->  autopipe simulate plan.json --svg step.svg
                                            ->  autopipe run plan.json --local 4
                                            ->  autopipe export plan.json --to slurm
                                            ->  autopipe emit plan.json -o FOLDER
                                            ->  autopipe diff plan.json other.json

One file for each command, and a room for `run` (`running`). `--help` imports them all, so slow
imports, torch above all, stand inside the commands' functions.
Never found here: planning, training, drawing; commands call the other rooms for these.

Other rooms use: nothing. `autopipe/__main__.py` calls `entry.main`; an emitted train.py uses the
names in `__all__`.
"""

from autopipe.cli.entry import main, program
from autopipe.cli.running.summary import report
from autopipe.terminal.console import quiet, say, tell
from autopipe.terminal.paths import check_file, check_folder

__all__ = [
    "check_file",
    "check_folder",
    "main",
    "program",
    "quiet",
    "report",
    "say",
    "tell",
]
