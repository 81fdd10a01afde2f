"""``extproc replicas``: what is in a pool, and who joins and leaves it by command.

What cannot be done is raised as ReplicaError or, where Redis does not do its part, as RedisError.
"""
