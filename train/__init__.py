"""How a checkpoint is made: text to a model folder that `from_pretrained` reads."""
