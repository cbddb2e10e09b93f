"""What all commands share: an option, a sentence, a bar  ->  what a user reads in a terminal.

In: typer's options, lines of talk, progress, file names as they were typed. Out: text on stdout and
stderr; usage errors as sentences.
Never found here: what a command does (`cli`), how a plan is shown (`report`).

Only `cli` uses it, and any of its files.

    commands   makes a function a command: errors, exit codes, the options that all have
    option_groups  options as the fields of a dataclass
    console    what is said, and whether: --quiet, --debug
    bars       progress
    paths      the files that are read, the folders that are written to
    contract   what a model file has, for help and for `init`
    usage      typer's usage errors, as sentences with a hint
"""
