"""All that decides how to split a model: its cost model, its search, and what drives them."""
