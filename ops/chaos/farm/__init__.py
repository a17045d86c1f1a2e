"""Kill runs of builds: thousands of actions through a farm door, while every process of the farm is killed at random.

Run from the root of the repository: `python -m ops.chaos.farm.run --actions 5000 --seed 1`; ops/chaos/README.md tells
how to read what it prints. It may import the product and the fault runs. Read first: `run`.
"""
