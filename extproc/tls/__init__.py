"""TLS on the ports that others connect to: files, read again when they change.

A file that cannot be used is raised as ValueError, whose message names it and says why.
"""
