"""How a checkpoint is made: text to a model folder that `from_pretrained` reads.

What belongs here: settings, data path, training loop, and measurements of pretrained models.
Not here: tasks and scores (`finetune`), or the model itself (`roformer`).
"""
