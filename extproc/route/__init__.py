"""Policies, one file each: which replica gets this request."""
