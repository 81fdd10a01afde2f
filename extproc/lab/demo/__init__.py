"""The whole system on one machine: real processes on free ports, and sample traffic.

A process that is not there, does not start or dies is raised as ProcessError, with its last lines.
"""
