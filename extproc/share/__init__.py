"""Redis: what is written, under which key, for how long.

What Redis does not do or tell is raised as RedisError.
"""
