"""The same recorded responses under several methods: assigned, measured where needed, kept, and held against another.

`recorded` reads a step back, `needs` refuses what cannot be had, `source` is the run's data and `opened` a model,
`measure` makes a method's evidence, `store` keeps results, `run` does all of it, `agreement` says how far they agree.
"""
