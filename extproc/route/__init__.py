"""Policies: which replica gets this request."""
