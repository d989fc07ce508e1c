"""Prompts of random words: the same kind of text for every benchmark, new each time, so no prefix cache answers.

Owns: the words.
"""

import random

WORDS = (
    "river", "stone", "lantern", "orchard", "copper", "violet", "harbour", "meadow", "winter", "engine", "paper",
)  # fmt: skip


def random_words(num_words: int, chance: random.Random) -> str:
    """`num_words` words, about 1.35 tokens each for the default model."""
    return " ".join(chance.choice(WORDS) for _ in range(num_words))
