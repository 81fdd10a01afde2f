"""Redis: keys, values, and how long Redis keeps each value.

Functions raise RedisError if Redis refuses a command or does not answer in time.
"""
