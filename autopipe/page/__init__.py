"""A plan, its sheets and a run's recording  ->  one HTML page that needs nothing besides itself.

In: a plan; of it and its rivals sheets (`scaling.sheet`), if their model is at hand; of a run what
`report.recorded` has read. Out: text of a page: HTML with its styles, its script and its data.
Never found here: torch, decisions; a text that becomes markup (templates escape all of them).

Other rooms use: `write.page`.

    contents    what stands on a page, as data               start here
    waterfall   a step from the devices' peak to waiting, and what a run measured
    steps       a step's boxes, planned and measured
    memory      what each device holds over the step
    losses      the loss by steps
    advice      where time went, and what to change
    write       all of it in the template
    assets/     page.html, style.css, formulas.js (evaluates sheets), page.js (sliders, zoom)
"""
