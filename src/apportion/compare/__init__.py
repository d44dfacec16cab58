"""The same recorded responses under several methods: assigned, measured where needed, kept, and held against another.

`recorded` reads a step back, `needs` refuses what cannot be had, `opened` is the model, `measure` makes a method's
evidence, `store` keeps results, `compared` does all of it, `agreement` says how far methods agree.
"""
