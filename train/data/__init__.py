"""From text files to batches of token ids: reading, vocabulary, tokenising, order and masking.

What belongs here: everything that decides which tokens a step sees, as pure functions of the seed.
Not here: models, losses, optimizers and processes (`train.loop`).
"""
