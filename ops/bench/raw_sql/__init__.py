"""The same work by raw SQL, as something to compare the pool with.

`floor` measures bare tables, `layout` two layouts of our own tables. May import the modules of `ops.bench` beside it.
"""
