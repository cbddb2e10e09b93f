"""A plan, its sheets and a run's recording  ->  one HTML page that needs nothing besides itself.

In: a plan; the sheets of it and its rivals (`scaling.sheet`), if the model is at hand; a run's
recording (`report.recorded`). Out: the text of a page: HTML with its styles, script and data.
Never found here: torch, decisions; text that becomes markup (templates escape all text).

Other rooms use: `write.page`.

    contents    the contents of a page, as data              start here
    waterfall   a step from the devices' peak to waiting, and what a run measured
    steps       a step's boxes, planned and measured
    memory      what each device holds over the step
    losses      the loss by steps
    advice      where time went, and what to change
    write       all of it in the template
    assets/     page.html, style.css, formulas.js (evaluates sheets), page.js (sliders, zoom)
"""
