"""The decoder and what comes with it: weights, config, tokenizer, chat template.

Owns: reading model files and computing logits. Called by the runner and the roles' `main.py`. Must never know requests.
"""
