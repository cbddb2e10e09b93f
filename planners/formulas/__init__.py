"""A model, or a plan of one  ->  what it costs as formulas in rows, tokens and a link's bandwidth.

In: what a user passes to `autopipe.plan`, or a plan and its model. Out: `model_costs.Formulas` for
a person who reads a model's costs; a `scaling.sheet.Sheet` of a plan and of each of its rivals.
Never found here: how a page shows them; seconds that are in no formula of `ir.op_seconds`.

Other rooms use: `model_costs.cost_formulas`, `.Formulas`, `cost_sheet.sheet`, `.as_data`,
`sheets.sheets`.

    model_costs, cost_sheet   a model's operations and bytes, part by part, for people
    lengths                   the plan's model traced again, with its tokens as a symbol
    from_sympy                a formula of sympy's as plain data
    stage_seconds             a stage's seconds: sums of rooflines
    stage_bytes               a stage's bytes: polynomials through dry runs
    rivals                    plans of other meshes, and of less memory or a slower link
    sheets                    all of it: a plan and its rivals as sheets                 start here
"""
