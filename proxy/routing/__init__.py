"""Which engine gets a leg.

Owns: the policies. Called by the journey. Must never do I/O: a policy looks and answers.
"""
