"""Generated text taken apart into content, reasoning and tool calls, piece by piece.

Owns: the parsers, the same for streams and whole answers. Called by `serving.chat`. Must never know HTTP or tokens.
"""
