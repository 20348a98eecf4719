"""Data path: text files to batches of token ids, as pure functions of the seed.

Read in this order: documents, vocabulary, corpus, token_store, batching, masking, stages.
Not here: models, losses, optimizers and processes (`train.loop`).
"""
