"""Small parts that every room may use: addresses, files, the clock, signals."""
