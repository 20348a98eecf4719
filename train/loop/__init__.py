"""The parts of the training loop: model and loss, optimizer, checkpoints, logs, signals.

What belongs here: what `train/pretrain.py` and `finetune/glue.py` call around a step.
Not here: the loops themselves, reading of text (`train.data`), or the commands of `train.analysis`.
"""
