"""Demo of the whole system on one machine: real processes on free ports, and sample traffic."""
