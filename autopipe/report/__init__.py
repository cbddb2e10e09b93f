"""A `Plan`, a timeline or recorded tracks  ->  text, SVG, HTML, Perfetto, JSON.

In: finished data: a plan, a predicted timeline, or the events that a run recorded. Out: text for a
terminal, pictures, pages and files, and plain numbers for programs.
Never found here: torch, decisions.

Other rooms use: `explain.explain`, `recorded.load`, `.begin`, `.end`, `figures.compare`,
`.figures`, `draw_svg.svg`, `as_json.of_plan`, `.of_timeline`, `facts`, `fullest`, `spending.bars`,
`.speed`, `schedule_page.of_schedule`, `.from_file`, `.describe`, `paper.width`, `colours`,
`tracks.Track`, `.bubbles`, `perfetto.save`, `.about`.
"""
