"""Loading the configuration: from TOML and the environment to settings, with errors that name the key.

It may import the modules directly in `assigner`, and `schema`. Read first: loading.py and keys.py.
"""
