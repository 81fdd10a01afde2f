"""Requests that wait at the router until a replica can carry them to their end."""
