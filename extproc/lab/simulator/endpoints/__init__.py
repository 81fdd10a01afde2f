"""The dialects a replica speaks: one file for each endpoint."""
