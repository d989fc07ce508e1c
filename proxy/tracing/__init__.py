"""What a trace shows of a journey, and the way to the collector.

Owns: the journey's spans. Called by the journey. Must never hold up a request.
"""
