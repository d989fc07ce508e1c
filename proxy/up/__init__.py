"""`pd-up`: P, D and the proxy as three processes on one machine, started and stopped together.

Owns: the child processes. Called from the command line and by the demo. Must never import what it starts.
"""
