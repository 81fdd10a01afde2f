"""``extproc replicas``: what is in a pool, and who joins and leaves it by command."""
