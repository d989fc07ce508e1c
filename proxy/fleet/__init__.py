"""The engines in front of which the proxy stands: who they are, how they feel, how busy they are.

Owns: workers, their health and load. Called by the journey and routing. Must never know request bodies.
"""
