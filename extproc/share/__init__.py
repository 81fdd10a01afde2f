"""Redis: keys, values, and how long each lives.

RedisError is raised if Redis refuses a command or does not answer in time.
"""
