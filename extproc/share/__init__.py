"""Redis: keys, values, and how long each lives.

Anything that Redis does not do or answer is raised as RedisError.
"""
