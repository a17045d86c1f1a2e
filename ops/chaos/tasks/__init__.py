"""Kill runs of tasks: thousands of tasks with effects, whose processes are killed and stopped at random.

Run from the root of the repository: `python -m ops.chaos.tasks.run --tasks 5000 --seed 1`; ops/chaos/README.md tells
how to read what it prints. It may import the product and the fault runs. Read first: `once`, which is how an effect
happens once, and `checker`, which says what a violation is.
"""
