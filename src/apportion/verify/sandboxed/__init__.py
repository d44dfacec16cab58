"""Scripts that run in processes of their own, under `python -I -S`, without this package on their path.

`jail` locks itself down and serves a hostile program; `harness` runs a data set's tests against it; `wire` is the
language between them. They import nothing but the standard library and one another.
"""
