"""Commands that read finished runs: loss curves, lengths beyond training, decay with distance.

What belongs here: measurements and figures of models that are trained.
Not here: anything that the loop needs; nothing in `train.loop` or `train.data` imports this.
"""
