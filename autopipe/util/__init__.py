"""General tools: atomic files, JSON, numbers as text, registries, progress, seeds.

In: plain Python values, paths and functions. Out: files that are whole or absent, text for people,
dataclasses checked field by field. Its only import from autopipe is `autopipe.errors`.
Never found here: models, graphs, plans, processes.

Other rooms use: `numbers.memory`, `.seconds`, `.percent`, `.count`, `codec.load`, `.save`,
`.from_json`, `.to_json`, `atomic_file.write`, `.writing`, `dims.parse`, `.size_at`,
`dtypes.name_of`, `.bytes_of`, `progress.phase`, `.shown`, `.Say`, `registry.entering`,
`seeding.seed`, `stopwatch.Stopwatch`, `gc_pause.loading`, `.collector_paused`, `shortcuts.on`,
`self_checks.on`, `host_memory.available`, `.total`, `.in_turn`.
"""
