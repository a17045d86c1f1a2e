"""Loading the configuration: TOML and environment to settings, with errors that name the key.

It imports the ground modules of `assigner` and `schema`. Read first: loading.py and keys.py.
"""
