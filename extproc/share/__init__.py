"""Redis: keys, values, and how long Redis keeps each value.

Functions and methods raise RedisError if Redis refuses a command or does not answer in time.
"""
