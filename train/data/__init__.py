"""Data path: text files to batches of token ids, as pure functions of the seed.

Read in this order: documents, vocabulary, corpus, batching, masking.
Not here: models, losses, optimizers and processes (`train.loop`).
"""
