"""The checks of `leasehold db doctor`: what of a server, its settings and its tables makes a pool slow or unsafe.

Each file reads what it needs in one short, read-only transaction and judges it in a pure function.
"""
