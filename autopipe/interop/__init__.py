"""A `Plan`  ->  what other runtimes call it, with what they cannot say; and two plans compared.

In: a plan. Out: `Exported`, a text in the target's own fields and a list of what it leaves out; or
`Difference`, what two plans train and how they differ in doing so.

Never found here: torch, the packages that the texts are for, and how ranks are started.

Other rooms use: `targets.RUNTIMES`, `compare.compare`.
"""
