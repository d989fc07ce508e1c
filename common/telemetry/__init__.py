"""What a process tells its operator: timeline, metrics, logs.

Owns: stage arithmetic, metric names, log setup. Called by every role. Must never know torch or HTTP.
"""
