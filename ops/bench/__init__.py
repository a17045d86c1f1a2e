"""The benchmark: what the pool can do on this machine, and what each job costs.

Run from the root of the repository as modules, such as `python -m ops.bench.run`; README.md lists them. Read `run` and
`workloads` first. Everything here may import the product, and nothing of the product imports it.
"""
