"""Compiled messages of the external processing protocol."""
