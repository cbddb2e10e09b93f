"""A `Plan`, a timeline or recorded tracks  ->  text, SVG, HTML, Perfetto, JSON.

In: finished data: a plan, a predicted timeline, or the events that a run recorded. Out: text for a
terminal, pictures, pages and files, and plain numbers for programs.
Never found here: torch, decisions.

Other rooms use: `explain.explain`, `page.page`, `figures.compare`, `draw_svg.svg`,
`as_json.of_plan`, `.of_timeline`, `facts.idle`, `spending.speed`, `schedule_page.of_schedule`,
`.from_file`, `.describe`, `paper.width`, `tracks.Track`, `.bubbles`, `perfetto.save`, `.about`.
"""
