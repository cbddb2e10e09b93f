"""Small models written by hand, each with one thing that splitters stumble over.

In: nothing. Out: a `Subject` for each class marked `@odd(...)` in the files of this package, one
idea a file. The class's docstring says what is odd about it.
"""
