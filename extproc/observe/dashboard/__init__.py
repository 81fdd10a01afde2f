"""The page on a router's admin address: its fleet, its decisions and what it holds, live."""
