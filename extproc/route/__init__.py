"""Decisions: which replica gets a request, and which requests wait at the router."""
