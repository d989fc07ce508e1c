"""One YAML file per deployment: loading, strict checking, and the engine's section.

Owns: the only YAML reader. Called by each `main.py`. Must never know what the settings are used for.
"""
